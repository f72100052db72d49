"""The one connection between a process and the server of its host."""
