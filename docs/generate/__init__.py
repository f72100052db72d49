"""What writes the generated pages of docs/; no process of kvstrata runs it."""
