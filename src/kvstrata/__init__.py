"""kvstrata: a KV-cache server for LLM inference and its vLLM connector."""

__version__ = "0.1.0"
