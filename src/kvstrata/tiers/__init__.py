"""L2: the media in service, and the controllers that move chunks between them and L1."""
