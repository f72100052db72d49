"""Connectors; each one connects kvstrata to one kind of serving engine."""
