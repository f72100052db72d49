"""The shared-memory segment, who may map it, and the handshake that hands it over.

`paths` (where sockets and files lie), `segment` (files or memfds of one pool, adopted or made), `holder` (a process
that keeps memfds when a server dies), `attach` (both sides of the handshake), `linux` (the system calls that they
share).  This file imports nothing: the holder process must stay small.
"""
