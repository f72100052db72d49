"""Connectors: what plugs kvstrata into a serving engine."""
