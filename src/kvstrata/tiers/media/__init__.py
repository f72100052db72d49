"""The media of L2, a folder each: its configuration and its adapter."""
