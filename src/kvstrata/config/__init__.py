"""Settings of server, controller and client: their model, their sources, and the treatment of LMCache's names."""
