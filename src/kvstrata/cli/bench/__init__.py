"""`kvstrata bench`: benchmarks of a running server, one storage adapter (`l2`), engines (`serve`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded


@guarded("kvstrata bench")
def main(arguments: Sequence[str] | None) -> int:
    """Run one benchmark, importing only that one; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["l2"]:
        from kvstrata.cli.bench.l2 import main as bench_l2

        return bench_l2(arguments[1:])
    if arguments[:1] == ["serve"]:
        from kvstrata.cli.bench.serve import main as bench_serve

        return bench_serve(arguments[1:])
    from kvstrata.cli.bench.engine import main as bench_engine

    return bench_engine(arguments)
