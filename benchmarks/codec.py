"""`codec_*`: what each chain of codecs makes of KV, and how fast, on one core.

Whole records through `Chain.encode` and `Chain.decode`, as the codec wrapper calls them in one of its threads:
checksums and the verification of the decoded record included, staging faulted in.

The KV is one of these, and the figures say which:

- what vLLM stores of the demo's random-weight model (tests/harness/vllm_model.py, "160m"), where it is installed:
  made here by a server with an `fs` directory behind it;
- records of another L2 directory of `fs`, given as KVSTRATA_BENCH_RECORDS, as they are;
- without vLLM, *synthetic random-weight KV*: keys and values of a random-weight attention layer, made here without a
  model. Its inputs are normalised vectors of normally distributed numbers, its weights normally distributed with the
  deviation 0.02, keys are rotated by position, everything is rounded to bf16, laid out as vLLM does on CPUs (kv heads,
  tokens, key then value). A product of many independent terms is normally distributed, so the numbers are drawn as
  such, with a factor of its own for each token and for each channel.

Trained models have outliers by channel and repeating content; ratios on their KV differ.

Sketch: a byte is read once and written once, so memcpy in the same run bounds it; the ratio is to that.
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

from benchmarks.common import figure, median_spread, scratch, sized, wait_until
from benchmarks.vllm_hit_ttft import prompt
from kvstrata.errors import ConfigError
from kvstrata.native import codec, copying
from kvstrata.native.copying import RecordSpec
from kvstrata.storage.base import PayloadKind
from kvstrata.storage.wrap.codec_chain import Chain, ChainSettings, ZstdOptions
from tests.harness import vllm_env, vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess

MODEL, LAYERS, KV_HEADS, TOKENS, HEAD = sized(("160m", 8, 8, 256, 64), ("19m", 4, 4, 256, 32))
"""The demo's model (tests/harness/vllm_model.py) and its chunks."""
RECORDS = sized(4, 1)
REPEATS = sized(7, 1)
SHAPE = (1, 2, KV_HEADS, 128, 2, HEAD)
"""For fp8: bf16, 2 blocks of 128 tokens, heads before tokens, key and value behind them."""
KEY = bytes(range(32))
CHAINS = {
    "zstd": ChainSettings(zstd=ZstdOptions()),
    "zstd_3": ChainSettings(zstd=ZstdOptions(level=3)),
    "zstd_no_planes": ChainSettings(zstd=ZstdOptions(planes=1)),
    "aes": ChainSettings(master_key=b"k" * 32),
    "zstd_aes": ChainSettings(zstd=ZstdOptions(), master_key=b"k" * 32),
    "fp8": ChainSettings(fp8=True),
    "fp8_zstd": ChainSettings(fp8=True, zstd=ZstdOptions()),
}


def synthetic(seed: int) -> bytes:
    """One record of synthetic random-weight KV."""
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
    length = copying.record_bytes(LAYERS, len(payload))
    record = mmap.mmap(-1, length)
    record[length - len(payload) :] = payload
    spec = RecordSpec(KEY, bytes(32), bytes(32), b"", TOKENS)
    address = copying.buffer_address(record, writable=True)
    copying.seal_record(address, length, spec, [len(payload) // LAYERS] * LAYERS)
    return record[:]


def found_records(folder: str) -> list[bytes]:
    """Records without a codec out of a directory of `fs`. Raises ConfigError when there are none."""
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


def records_of_vllm() -> list[bytes]:
    """What vLLM stores of a prompt of random tokens. Raises as ServerProcess and VllmProcess do."""
    with (
        scratch("codec") as folder,
        ServerProcess(folder / "server", l1_mb=256, l2="fs", chunk_tokens=TOKENS) as server,
    ):
        server.start()
        model = vllm_model.ensure_model(MODEL)
        with VllmProcess(model, folder / "vllm", extra=server.connector_config()) as vllm:
            vllm.generate(prompt(0, (RECORDS + 1) * TOKENS), max_tokens=1)
            l2 = folder / "server" / "l2"
            wait_until(lambda: len(list(l2.rglob("*.kvc"))) >= RECORDS, "the prompt's chunks are in L2")
            vllm.quit()
        server.stop()
        return found_records(str(l2))


def fp8_kind(record: bytes) -> PayloadKind:
    """The shape of the demo's model, where the record's sections have it."""
    section_bytes = int.from_bytes(record[520:524], "little")
    numbers, _ = codec.fp8_sizes(SHAPE[1:])
    return PayloadKind(2, SHAPE if section_bytes == 2 * numbers else None)


def rates_of(call: Callable[[], object], length: int) -> list[float]:
    """GB per second of this thread's CPU time, of each repeat, a warm-up apart: what else runs here takes nothing."""
    rates = []
    for repeat in range(REPEATS + 1):
        started = time.thread_time()
        call()
        if repeat:
            rates.append(length / (time.thread_time() - started) / 1e9)
    return rates


def measure(name: str, settings: ChainSettings, records: list[bytes], source: str) -> list[dict[str, Any]]:
    """Ratio, encoding and decoding of one chain."""
    chain = Chain(settings)
    total = sum(map(len, records))
    kinds = [fp8_kind(record) for record in records]
    if settings.fp8 and kinds[0].fp8 is None:
        print(f"   codec_{name}: the records have not the shape of the demo's model, left out", flush=True)
        return []
    places = [mmap.mmap(-1, len(record)) for record in records]
    for place, record in zip(places, records, strict=True):
        place[:] = record
    targets = [mmap.mmap(-1, chain.staging_bytes(len(record))) for record in records]
    copies = [mmap.mmap(-1, len(target)) for target in targets]
    backs = [mmap.mmap(-1, len(record)) for record in records]
    scratch = memoryview(bytearray(chain.staging_bytes(max(map(len, records)))))
    lengths = [0] * len(records)

    def encode() -> None:
        for i, (place, target, kind) in enumerate(zip(places, targets, kinds, strict=True)):
            made = chain.encode(memoryview(place), memoryview(target), lambda identity, part, kind=kind: kind)
            lengths[i] = made.length

    def decode() -> None:
        # Decrypting is done in place: a copy is decoded, as a load's staging is.
        for target, copy, back, length, record in zip(targets, copies, backs, lengths, records, strict=True):
            stored = memoryview(copy)[:length]
            copying.copy_at(
                copying.buffer_address(copy, writable=True),
                copying.buffer_address(target),
                length,
                cached=True,
            )
            chain.decode(stored, memoryview(back), record[16:48], scratch)

    def memcpy() -> None:
        for place, back in zip(places, backs, strict=True):
            copying.libc_copy_at(
                copying.buffer_address(back, writable=True), copying.buffer_address(place), len(place)
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
    line = f"   {name:<16} stored {stored / total:6.3f} of it   encode {encoding[0]:5.2f} GB/s"
    if all(lengths):
        decoding = median_spread(rates_of(decode, total))
        lossless = not settings.fp8
        if lossless and any(back[:] != record for back, record in zip(backs, records, strict=True)):
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
    """See the module."""
    folder = os.environ.get("KVSTRATA_BENCH_RECORDS", "")
    if folder:
        records, source = found_records(folder), f"records of {folder}"
    elif vllm_env.find() is not None:
        records, source = records_of_vllm(), f"vLLM's KV of a random-weight Llama of {MODEL} parameters"
    else:
        records = [synthetic(seed) for seed in range(RECORDS)]
        source = "synthetic random-weight KV, not of a model (vLLM is not installed)"
    print(f"   {len(records)} records of {len(records[0]) / (1 << 20):.1f} MiB: {source}", flush=True)
    return [one for name, settings in CHAINS.items() for one in measure(name, settings, records, source)]
