"""Token ids of prompts that arrive as text, so that the choice of an engine knows the exact prefix.

`source.Tokens` is what the gateway uses; the extra `gateway-tokens` has the packages that it needs.
"""
