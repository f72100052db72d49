"""Split requests: one engine computes the prompt, and another one loads its KV and answers."""
