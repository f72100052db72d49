"""Simulated engines, workloads and figures, shared by `kvstrata bench`, the benchmarks and the tests."""
