"""Writes the generated pages of docs/. No process of kvstrata runs it."""
