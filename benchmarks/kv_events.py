"""`kv_events_*`: what it costs the gateway to hear 64 engines' KV events and to ask what they have of a prompt.

Each engine publishes chains of blocks of 16 tokens, a batch for each prompt of drawn length, encoded as vLLM encodes
them.  The blocks stay until 8,192 are there, then the oldest are removed.

    _ingest   blocks a second that one core takes in (decoded, hashed, mapped, entered), beside decoding alone with
              msgspec in the same run
    _lookup   time of one question for a prompt of 131,072 tokens whose beginnings lie in all engines, without the
              hashing of its tokens, which is done once for each request
    _memory   bytes for each block that is known

The events are taken as by a gateway that joins late: everything is asked for again over ZMQ.

Sketch: a block costs a SHA-256 over 96 bytes (0.2 µs), an entry of a dictionary and one of the registry (0.5 µs), and
its 16 tokens are decoded (0.4 µs).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from array import array
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import compared, percentile, sized, wait_until
from kvstrata.gateway.residency.cache import decoded
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.residency.sources import Source
from kvstrata.testing.engine_sim.kv_events import BlockRemoved, BlockStored, Event, KVEventBatch
from kvstrata.testing.engine_sim.zmq_events import Publisher

ENGINES = sized(64, 3)
BLOCK_TOKENS = 16
KEPT_BLOCKS = sized(8_192, 600)
PROMPTS = sized(24, 6)
"""Batches of each engine."""
PROMPT_TOKENS = sized((1_000, 16_000), (200, 800))
ASKED_TOKENS = sized(131_072, 2_048)
QUESTIONS = sized(300, 3)
TARGET_BLOCKS_S = 64_000.0
"""64 engines that compute 16,000 tokens a second each."""
TARGET_LOOKUP_US = 1_000.0
TARGET_BYTES = 400


def steps(engine: int) -> list[list[Event]]:
    """What an engine publishes; the last is of a beginning of the prompt that is asked for."""
    draw = random.Random(engine)
    prompt = asked_tokens()
    made, kept = [], deque[int]()
    for turn in range(PROMPTS):
        blocks = draw.randrange(*PROMPT_TOKENS) // BLOCK_TOKENS
        tokens = [draw.randrange(128_000) for _ in range(blocks * BLOCK_TOKENS)]
        if turn == PROMPTS - 1:
            blocks = draw.randrange(1, len(prompt) // BLOCK_TOKENS)
            tokens = list(prompt[: blocks * BLOCK_TOKENS])
        names = [draw.getrandbits(64) for _ in range(blocks)]
        events: list[Event] = [BlockStored(names, None, tokens, BLOCK_TOKENS, None, "GPU", None, group_idx=0)]
        kept.extend(names)
        gone = [kept.popleft() for _ in range(max(0, len(kept) - KEPT_BLOCKS))]
        events += [BlockRemoved([name], "GPU", group_idx=0) for name in gone]
        made.append(events)
    return made


def asked_tokens() -> array[int]:
    """The prompt that is asked for."""
    draw = random.Random(-1)
    return array("I", [draw.randrange(128_000) for _ in range(ASKED_TOKENS)])


def publish(parent: Connection) -> None:
    """Be the publishers of all engines, with everything to be asked for again, until the parent sends something."""

    async def serve() -> None:
        publishers = []
        for engine in range(ENGINES):
            publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
            for events in steps(engine):
                publisher.publish(events)
            publisher.start()
            publishers.append(publisher)
        parent.send([(one.endpoint, one.replay_endpoint) for one in publishers])
        await asyncio.get_running_loop().run_in_executor(None, parent.poll, None)

    asyncio.run(serve())


def decoding() -> tuple[float, int]:
    """Seconds to decode everything, and the blocks that are stored in it."""
    seconds, blocks = 0.0, 0
    for engine in range(ENGINES):
        payloads = [msgspec.msgpack.encode(KVEventBatch(0.0, events, 0)) for events in steps(engine)]
        begun_s = time.perf_counter()
        batches = [decoded(payload) for payload in payloads]
        seconds += time.perf_counter() - begun_s
        blocks += sum(
            len(one.block_hashes) for batch in batches for one in batch.events[:1] if one.block_hashes
        )  # type: ignore[union-attr]
    return seconds, blocks


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096


def run() -> list[dict[str, Any]]:
    """Measure the four figures."""
    decoding_s, stored = decoding()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=publish, args=(there,), daemon=True)
    child.start()
    places = here.recv()
    residency = Residency(time.monotonic)
    try:
        before, begun_s = resident_bytes(), time.perf_counter()
        names = [f"engine-{number}" for number in range(ENGINES)]
        for name, place in zip(names, places, strict=True):
            residency.watch(name, Source(*place))

        def heard() -> bool:
            time.sleep(0.01)
            # An engine counts as known from the end of what it sends again, which comes after its last batch.
            return all(
                row["batches"] == PROMPTS and row["phase"] == "in_order" for row in residency.page().values()
            )

        wait_until(heard, "all events were heard", timeout_s=300.0)
        taken_s = time.perf_counter() - begun_s
        known = sum(row["blocks"] for row in residency.page().values())
        grown = resident_bytes() - before
        asked = Prompt(asked_tokens())
        begun_s = time.perf_counter()
        asked.keys(BLOCK_TOKENS)
        hashing_s = time.perf_counter() - begun_s
        times = []
        for _ in range(QUESTIONS):
            begun_s = time.perf_counter()
            found = residency.known(asked)
            times.append(1e6 * (time.perf_counter() - begun_s))
        if len(found) != ENGINES:
            raise RuntimeError(f"{len(found)} of {ENGINES} engines were found")
    finally:
        residency.close()
        here.send(True)
        child.join()
    return [
        compared(
            "kv_events_ingest",
            stored / taken_s,
            "blocks/s",
            "decoding alone with msgspec",
            stored / decoding_s,
            inverse=True,
            ok=stored / taken_s >= TARGET_BLOCKS_S,
            blocks=stored,
        ),
        compared(
            "kv_events_lookup",
            times,
            "µs",
            "hashing the prompt",
            1e6 * hashing_s,
            most_value=TARGET_LOOKUP_US,
            p99_us=percentile(times, 0.99),
            engines=ENGINES,
        ),
        compared(
            "kv_events_memory",
            grown / known,
            "bytes/block",
            "the target",
            TARGET_BYTES,
            most_value=TARGET_BYTES,
            blocks=known,
        ),
    ]
