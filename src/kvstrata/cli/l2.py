"""`kvstrata l2 rewrite`: writes the records of a storage again with the present key, while no server uses it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.clock import SystemClock
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.stack import innermost
from kvstrata.storage.wrap.codec_rewrite import rewrite

DONE = ("rewritten", "current")


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata l2`."""
    top = argparse.ArgumentParser(prog="kvstrata l2", description="work on the storage of an L2 adapter")
    commands = top.add_subparsers(dest="command", required=True)
    again = commands.add_parser(
        "rewrite",
        help="write all records again with the first of key_files; may be interrupted and run again",
        description="Writes all records again with the codecs of the entry and the first of its key_files. The server "
        "that owns the storage must be stopped. Records that have this key already stay as they are, so an interrupted "
        "run can be started again.",
    )
    again.add_argument("entry", metavar="JSON", help="the adapter, as for --l2-adapter of the server")
    return top


@guarded("kvstrata l2")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status: 1 if a record was not rewritten. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    counts = asyncio.run(_rewrite(options.entry))
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")
    return 0 if all(name in DONE for name in counts) else 1


async def _rewrite(entry: str) -> dict[str, int]:
    config = configure_tier(entry, 0, path="JSON")
    adapter = innermost(config.recipe)
    await adapter.open(AdapterContext("kvstrata-l2-rewrite", SystemClock(), 0, 0, lambda key: None))
    try:
        return await rewrite(adapter, config.recipe.codec.staging_bytes)
    finally:
        await adapter.close()
