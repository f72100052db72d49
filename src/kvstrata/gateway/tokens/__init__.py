"""Computes the token ids of text prompts, so that the choice of an engine knows which prefix is cached exactly.

The gateway uses `source.Tokens`; the extra `gateway-tokens` installs the required packages.
"""
