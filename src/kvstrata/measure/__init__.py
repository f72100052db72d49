"""What `kvstrata bench`, the benchmarks and the tests share: an engine's blocks without an engine, and figures."""
