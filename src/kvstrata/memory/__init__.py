"""The shared-memory segment, who may map it, and the handshake that hands it over.

`paths` (where sockets and files lie), `segment` (files or memfds of one pool, adopted or made), `attach` (both
sides of the handshake), `linux` (the system calls that they share).
"""
