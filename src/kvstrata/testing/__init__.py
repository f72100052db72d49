"""Shipped tools for authors of adapters and for our own tests: the adapter contract suite, strategies, `kvstrata sim`.

Most modules need the `test` extra.  The server imports nothing from this package.
"""
