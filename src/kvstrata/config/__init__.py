"""Settings of our processes and clients: their model, their sources, and the mapping of LMCache's names."""
