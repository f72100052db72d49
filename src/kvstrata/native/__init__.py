"""The compiled modules; there is no fallback in Python."""
