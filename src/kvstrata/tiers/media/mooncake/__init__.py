"""Mooncake Store, through its Python client."""
