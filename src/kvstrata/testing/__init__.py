"""Shipped tools for authors of adapters and for our own tests: the adapter contract suite, strategies, seeded faults.

Most modules need the `test` extra.  The server imports this package only for a configured `fault_inject` adapter.
"""
