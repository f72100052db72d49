"""The handshake that hands the segment over: `server` (the instance's side), `checks`, `client` (the engine's side)."""
