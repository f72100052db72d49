"""Servers that speak RESP: Redis, Valkey and others."""
