"""Adapter hosts: a child process for an SDK that may hang or crash (`parent`, `frames`, `child`, `process`)."""
