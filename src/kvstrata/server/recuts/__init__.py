"""Serves engines from records of another geometry of the same model."""
