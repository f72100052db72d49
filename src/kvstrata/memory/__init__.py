"""The shared-memory segment and who may map it.

`paths` (where sockets and files lie), `segment` (files or memfds of one pool, adopted or made), `linux` (the system
calls behind them).
"""
