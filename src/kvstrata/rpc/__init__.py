"""The RPC contract between engine processes and the server (see docs/internals/protocol.md)."""
