"""The connection between a process and the server of its host: its transport, and the process's half of the attach."""
