"""This instance as a member of a cluster."""
