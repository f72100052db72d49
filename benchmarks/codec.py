"""`codec_*`: how much each chain of codecs shrinks KV, and how fast it encodes and decodes KV, on one core.

Whole records go through `Chain.encode` and `Chain.decode`, as the codec wrapper calls them in one of its threads, with
checksums and the verification of the decoded record.  Staging memory is faulted in beforehand.

The KV comes from one of these sources, and the figures name it:

- the plain records of an existing directory of `fs`, if KVSTRATA_BENCH_RECORDS names one;
- else *synthetic random-weight KV*: keys and values of a random-weight attention layer, drawn here without a model.
  The input of such a layer is normalised vectors of normally distributed numbers, and its weights are normally
  distributed with the standard deviation 0.02; so its output, a sum of many independent products, is normally
  distributed too.  The numbers are therefore drawn from that distribution, with a factor for each token and for each
  channel, rounded to bf16, and laid out as vLLM does on CPUs (kv heads, tokens, key then value).

The KV of trained models has outliers by channel and repeating content, so its ratios differ.

Sketch: a byte is read once and written once, so memcpy is the bound; the ratio compares with memcpy in the same run.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import figure, median_spread, sized
from kvstrata.errors import ConfigError
from kvstrata.native import core
from kvstrata.native.core import RecordSpec
from kvstrata.tiers.base import two_bytes
from kvstrata.tiers.codec import Chain, ChainSettings, ZstdOptions

LAYERS, KV_HEADS, TOKENS, HEAD = sized((8, 8, 256, 64), (4, 4, 256, 32))
"""As in chunks of the demo's model (tests/harness/vllm_model.py, "160m")."""
RECORDS = sized(4, 1)
REPEATS = sized(7, 1)
KEY = bytes(range(32))
CHAINS = {
    "zstd": ChainSettings(zstd=ZstdOptions()),
    "zstd_3": ChainSettings(zstd=ZstdOptions(level=3)),
    "zstd_no_planes": ChainSettings(zstd=ZstdOptions(planes=1)),
    "aes": ChainSettings(master_key=b"k" * 32),
    "zstd_aes": ChainSettings(zstd=ZstdOptions(), master_key=b"k" * 32),
}


def synthetic(seed: int) -> bytes:
    """Make one record of synthetic random-weight KV."""
    noise = random.Random(seed)
    deviation = 0.02 * (KV_HEADS * 2 * HEAD) ** 0.5
    parts = []
    for _ in range(LAYERS):
        channels = [noise.uniform(0.7, 1.3) * deviation for _ in range(2 * HEAD)]
        tokens = [noise.uniform(0.8, 1.2) for _ in range(TOKENS)]
        pool = [noise.gauss(0, 1) for _ in range(1 << 15)]
        for _ in range(KV_HEADS):
            for token in tokens:
                at = noise.randrange(len(pool) - 2 * HEAD)
                numbers = [c * token * g for c, g in zip(channels, pool[at : at + 2 * HEAD], strict=True)]
                packed = struct.pack(f"<{2 * HEAD}f", *numbers)
                row = bytearray(4 * HEAD)
                row[0::2], row[1::2] = packed[2::4], packed[3::4]
                parts.append(bytes(row))
    payload = b"".join(parts)
    length = core.record_bytes(LAYERS, len(payload))
    record = mmap.mmap(-1, length)
    record[length - len(payload) :] = payload
    spec = RecordSpec(KEY, bytes(32), bytes(32), b"", TOKENS)
    address = core.buffer_address(record, writable=True)
    core.seal_record(address, length, spec, [len(payload) // LAYERS] * LAYERS)
    return record[:]


def found_records(folder: str) -> list[bytes]:
    """Read records that no codec has encoded from a directory of `fs`. Raises ConfigError if it holds none."""
    records = []
    for path in sorted(Path(folder).rglob("*.kvc")):
        record = path.read_bytes()
        if len(record) > 4096 and not any(record[80:88]):
            records.append(record)
        if len(records) == RECORDS:
            break
    if not records:
        raise ConfigError(
            f"KVSTRATA_BENCH_RECORDS: {folder!r} holds no plain record (*.kvc)", field="records"
        )
    return records


def rates_of(call: Callable[[], object], length: int) -> list[float]:
    """Return GB per second of this thread's CPU time for each repeat after a warm-up.

    It counts CPU time, so that other processes on this machine do not lower the rates.
    """
    rates = []
    for repeat in range(REPEATS + 1):
        started = time.thread_time()
        call()
        if repeat:
            rates.append(length / (time.thread_time() - started) / 1e9)
    return rates


def measure(name: str, settings: ChainSettings, records: list[bytes], source: str) -> list[dict[str, Any]]:
    """Measure how one chain encodes and decodes; print and return the figures."""
    chain = Chain(settings)
    total = sum(map(len, records))
    places = [mmap.mmap(-1, len(record)) for record in records]
    for place, record in zip(places, records, strict=True):
        place[:] = record
    targets = [mmap.mmap(-1, chain.staging_bytes(len(record))) for record in records]
    copies = [mmap.mmap(-1, len(target)) for target in targets]
    backs = [mmap.mmap(-1, len(record)) for record in records]
    lengths = [0] * len(records)

    def encode() -> None:
        for i, (place, target) in enumerate(zip(places, targets, strict=True)):
            lengths[i] = chain.encode(memoryview(place), memoryview(target), two_bytes)

    def decode() -> None:
        # Decryption overwrites its input, so a copy is decoded, as a load decodes its staging buffer.
        for target, copy, back, length, record in zip(targets, copies, backs, lengths, records, strict=True):
            stored = memoryview(copy)[:length]
            core.libc_copy_at(core.buffer_address(copy, writable=True), core.buffer_address(target), length)
            chain.decode(stored, memoryview(back), record[16:48])

    def memcpy() -> None:
        for place, back in zip(places, backs, strict=True):
            core.libc_copy_at(
                core.buffer_address(back, writable=True), core.buffer_address(place), len(place)
            )

    floor, _ = median_spread(rates_of(memcpy, total))
    encoding = median_spread(rates_of(encode, total))
    stored = sum(length or len(record) for length, record in zip(lengths, records, strict=True))
    common: dict[str, Any] = {"target": "reported", "ok": True, "kv": source, "ratio_to": "memcpy, one core"}
    figures = [
        figure(
            f"codec_{name}_encode", value=encoding[0], unit="GB/s a core", ratio=encoding[0] / floor,
            spread=encoding[1], stored_share=stored / total, **common,
        )
    ]  # fmt: skip
    line = f"   {name:<16} stored share {stored / total:6.3f}   encode {encoding[0]:5.2f} GB/s"
    if all(lengths):
        decoding = median_spread(rates_of(decode, total))
        if any(back[:] != record for back, record in zip(backs, records, strict=True)):
            raise RuntimeError(f"{name}: decoded to other bytes")
        line += f"   decode {decoding[0]:5.2f} GB/s"
        figures.append(
            figure(
                f"codec_{name}_decode", value=decoding[0], unit="GB/s a core", ratio=decoding[0] / floor,
                spread=decoding[1], stored_share=stored / total, **common,
            )
        )  # fmt: skip
    print(line, flush=True)
    return figures


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    folder = os.environ.get("KVSTRATA_BENCH_RECORDS", "")
    if folder:
        records, source = found_records(folder), f"records of {folder}"
    else:
        records, source = (
            [synthetic(seed) for seed in range(RECORDS)],
            "synthetic random-weight KV, not of a model",
        )
    print(f"   {len(records)} records of {len(records[0]) / (1 << 20):.1f} MiB: {source}", flush=True)
    return [one for name, settings in CHAINS.items() for one in measure(name, settings, records, source)]
