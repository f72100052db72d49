"""The RPC contract between engine processes and the server (see docs/protocol.md)."""
