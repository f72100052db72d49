"""The server's log lines and metrics."""
