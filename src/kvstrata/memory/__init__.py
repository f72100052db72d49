"""The shared-memory segment, who may map it, and the handshake that hands it over.

`paths` (where things lie), `segment` (files or memfds of one pool, adopted or made), `holder` (process that
keeps memfds over a server's death), `attach` (both sides of the handshake),
`linux` (the system calls all of them share).  This file imports nothing: the holder process must stay
small.
"""
