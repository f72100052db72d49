"""Token ids of prompts that arrive as text, so that the choice of an engine knows the exact prefix.

The gateway uses `source.Tokens`; the extra `gateway-tokens` installs the packages that it needs.
"""
