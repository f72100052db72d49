"""`make demo`; `__main__.py` says what it shows."""
