"""What adapter authors and our own tests share: the adapter contract suite, strategies, seeded faults.

Needs the `test` extra.  Nothing in the server imports this package unless a configured `fault_inject` adapter
asks for it.
"""
