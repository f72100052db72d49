"""Requests that are split: one engine computes the prompt, and the one that answers gets the KV from there."""
