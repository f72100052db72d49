"""From tokens to keys: the hash chain of one request and the storage keys derived from it.

`docs/internals/formats.md` specifies the derivation, and native code computes it:

    root     = SHA-256(canonical JSON of layout and request identity)        (`kvstrata.types.identity_root`)
    c_0      = SHA-256(root ‖ tokens_0 ‖ extra_0)
    c_i      = SHA-256(c_(i-1) ‖ tokens_i ‖ extra_i)
    storage  = SHA-256(c_i ‖ slice digest)

Tokens are unsigned 32-bit little-endian; `extra_i` is empty, or 32 bytes for a chunk with media (`keys.chunking`) and
for every chunk of an identity whose keys look ahead (`keys.chunking.lookahead_extra`).  All inputs of one hash but the
last, `extra`, have fixed lengths, so no two different inputs give the same byte string.
"""

from kvstrata.keys.chunking import ChunkHasher, MediaItem

__all__ = ["ChunkHasher", "MediaItem"]
