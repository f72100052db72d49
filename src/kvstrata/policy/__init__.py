"""Decisions without I/O: no await, no clock, no socket."""
