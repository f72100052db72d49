"""The admin HTTP port: health, metrics, status, explain, prewarm, clear."""
