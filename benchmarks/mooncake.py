"""`mooncake_put`, `mooncake_load`, `exists_1024_mooncake`: the adapter in its host against the bare client.

A master and a holder run on this machine, and all transfers go over tcp on the loopback: 64 records of 1 MiB a batch,
and 1,024 small records for `exists`.  In each round three ways take turns, so that a busy machine slows all alike: the
adapter in its host; the bare client in this process; and a bare process, which is the floor (`floor_ratio`).  The bare
process blocks on a socket, calls the bare client, verifies the loaded records as the adapter does, and answers with a
byte for each record.  No adapter that verifies and that runs in a process of its own can be faster.

Sketch: before a put the adapter asks which records exist (one call, 0.1 ms), after a load it verifies 64 MiB (3 ms at
20 GB/s), and its host costs two messages a batch, in addition to 30 to 90 ms of transfer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from benchmarks.common import compared, median_spread, sized
from benchmarks.hosted import (
    BareProcess,
    Extents,
    MooncakeClient,
    Way,
    beside_mooncake,
    keys_of,
    serve_bare,
    turns,
)
from kvstrata.native.core import record_bytes
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.host.parent import HostedAdapter

ITEMS = sized(64, 8)
PAYLOAD_BYTES = 1 << 20
SMALL_BYTES = 4096
EXISTS = 1024
ROUNDS = sized((3, 42), (1, 2))
EXISTS_ROUNDS = sized((3, 300), (1, 5))
MOVE_TARGET, EXISTS_TARGET = 0.95, 1.2


async def serve(setup: dict[str, Any], payload_bytes: int, channel_fd: int, extents_fd: int) -> None:
    """Body of the bare process."""
    await serve_bare(channel_fd, MooncakeClient(setup, Extents(ITEMS, payload_bytes, extents_fd)))


async def measure(setup: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Return [the adapter's, the bare client's, the bare process's] seconds of each round, by figure."""
    found: dict[str, list[list[float]]] = {}
    for payload_bytes in (PAYLOAD_BYTES, SMALL_BYTES):
        extents = Extents(ITEMS, payload_bytes)
        hosted = configure_tier({"type": "mooncake_store", **setup}, 0)
        ways = [
            Way(HostedAdapter(hosted, kill_ms=600_000), extents),
            MooncakeClient(setup, extents, verifies=False),
            BareProcess("benchmarks.mooncake", [json.dumps(setup), str(payload_bytes)], extents),
        ]
        for way in ways:
            await way.open()
        if payload_bytes == PAYLOAD_BYTES:
            moved = await turns(ways, ("put", "load"), ROUNDS, ITEMS)
            found["mooncake_put"], found["mooncake_load"] = moved["put"], moved["load"]
        else:
            keys = keys_of(1 << 20, EXISTS)
            for begin in range(0, EXISTS, ITEMS):
                extents.seal(keys[begin : begin + ITEMS])
                assert await ways[0].put(keys[begin : begin + ITEMS])
            asked = await turns(ways, ("exists",), EXISTS_ROUNDS, EXISTS, keys)
            found["exists_1024_mooncake"] = asked["exists"]
        for way in ways:
            await way.close()
    return found


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    rounds = beside_mooncake("benchmarks.mooncake", segment_mb=512)
    gb = ITEMS * record_bytes(1, PAYLOAD_BYTES) / 1e9

    def made(name: str, unit: str, to: str, amount: float, **bounds: float) -> dict[str, Any]:
        """The figure of `amount` per second, or of milliseconds if that is 0."""
        ours, raw, floor = zip(*rounds[name], strict=True)
        shown = [[amount / s if amount else s * 1e3 for s in way] for way in (ours, raw)]
        by_raw = [a / b if amount else b / a for a, b in zip(raw, floor, strict=True)]
        by_floor = [b / a if amount else a / b for a, b in zip(ours, floor, strict=True)]
        ratios = {"floor_ratio": median_spread(by_raw)[0], "ratio_to_floor": median_spread(by_floor)[0]}
        return compared(name, shown[0], unit, to, shown[1], **bounds, **ratios)

    return [
        made("mooncake_put", "GB/s", "raw batch_put_from of the same records", gb, least=MOVE_TARGET),
        made("mooncake_load", "GB/s", "raw batch_get_into of the same records", gb, least=MOVE_TARGET),
        made("exists_1024_mooncake", "ms", "raw batch_is_exist of the same keys", 0.0, most=EXISTS_TARGET),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        asyncio.run(serve(json.loads(sys.argv[1]), *map(int, sys.argv[2:])))
    else:
        print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # the bare clients' threads may crash an interpreter that exits normally
