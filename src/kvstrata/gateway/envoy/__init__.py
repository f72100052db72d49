"""Envoy, which carries requests and answers: its configuration, its process, and our filter inside it."""
