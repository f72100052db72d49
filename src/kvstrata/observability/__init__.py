"""What the server tells about itself: log lines, metrics, and why a chunk was not there."""
