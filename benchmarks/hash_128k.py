"""`hash_128k`: chain keys and storage keys of one slice for 128k tokens, with the conversion of vLLM's `list[int]`.

Sketch: 512 chunks × (32 + 1,024) bytes of SHA-256 for the chain, 512 × 64 for the slice, at the processor's SHA rate.
The ratio compares with Python, where `array` converts the tokens and `hashlib` hashes the same bytes.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from typing import Any

from benchmarks.common import compared, median_spread, sized
from kvstrata.keys import ChunkHasher

TOKENS = 131_072
CHUNK_TOKENS = 256
TARGET_MS = 2.0
PROMPTS = sized(8, 1)
REPEATS = sized(25, 2)
VOCABULARY = 128_256


def bare(root: bytes, tokens: list[int], digest: bytes) -> bytes:
    """Return the same keys by hashlib."""
    packed = array("I", tokens).tobytes()
    step = 4 * CHUNK_TOKENS
    own, storage, key = hashlib.sha256(root + digest).digest(), [], root
    for begin in range(0, len(packed), step):
        key = hashlib.sha256(key + packed[begin : begin + step]).digest()
        storage.append(hashlib.sha256(key + own).digest())
    return b"".join(storage)


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    source = random.Random(1)
    prompts = [[source.randrange(VOCABULARY) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    root, digest = hashlib.sha256(b"root").digest(), hashlib.sha256(b"slice").digest()
    ours: list[float] = []
    bares: list[float] = []
    for repeat in range(REPEATS):
        for tokens in prompts:
            started = time.perf_counter()
            hasher = ChunkHasher(root, CHUNK_TOKENS)
            hasher.feed(tokens)
            keys = hasher.storage_keys((digest,))
            middle = time.perf_counter()
            expected = bare(root, tokens, digest)
            ended = time.perf_counter()
            if keys != expected:
                raise RuntimeError("native keys differ from hashlib's")
            if repeat:  # the first round warms up
                ours.append((middle - started) * 1e3)
                bares.append((ended - middle) * 1e3)
    return [
        compared("hash_128k", ours, "ms", "hashlib and array", median_spread(bares)[0], most_value=TARGET_MS)
    ]
