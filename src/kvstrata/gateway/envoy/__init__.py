"""Envoy, which transports requests and responses: its configuration, its process, and the watcher filter in it."""
