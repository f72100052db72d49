"""Envoy, which carries requests and answers: its configuration, its process, and the watcher inside it."""
