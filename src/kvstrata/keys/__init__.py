"""From tokens to keys: the hash chain of one request and the storage keys derived from it.

The derivation is written down once, in `docs/formats.md`, and computed in native code:

    root     = SHA-256(canonical JSON of layout and request identity)        (`kvstrata.types.identity_root`)
    c_0      = SHA-256(root ‖ tokens_0 ‖ extra_0)
    c_i      = SHA-256(c_(i-1) ‖ tokens_i ‖ extra_i)
    storage  = SHA-256(c_i ‖ slice digest)

Tokens are unsigned 32-bit little-endian; `extra_i` is empty, or 32 bytes for a chunk with media (`keys.media`).
All inputs of one hash have fixed lengths, apart from `extra`, which is last: no two inputs share a byte string.
"""

from kvstrata.keys.chunking import ChunkHasher
from kvstrata.keys.multimodal import MediaItem

__all__ = ["ChunkHasher", "MediaItem"]
