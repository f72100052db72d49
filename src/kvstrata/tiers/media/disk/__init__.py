"""A log of segments on a local disk."""
