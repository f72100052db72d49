"""What followers of instances share: the directory of their chunks, and how it is kept up to date."""
