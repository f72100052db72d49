"""Tiers in service, and the controllers that move chunks between them and L1."""
