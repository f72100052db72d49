"""The common part of our long-running processes: start, tasks, HTTP port, signals, end."""
