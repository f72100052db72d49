"""Opens the segments of an instance: the shared one, and those of tenants with pools of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kvstrata.errors import SegmentError
from kvstrata.memory.linux import dump_memory
from kvstrata.memory.own_segments import open_own_segments
from kvstrata.memory.paths import segment_dir, socket_dir
from kvstrata.memory.segment import Segment
from kvstrata.process.lifecycle import soon
from kvstrata.server.plan import Plan, segment_settings


def open_segments(
    plan: Plan, port: int, closers: list[Callable[[], Coroutine[Any, Any, None]]]
) -> tuple[Segment, dict[str, Segment], Path]:
    """Make or adopt L1. Returns the shared segment, those of tenants, and the folder of the sockets.

    `closers` gets what closes them. Raises ConfigError or SegmentError.
    """
    settings = plan.settings
    directory = socket_dir(settings.socket_dir, port)
    shm = (
        Path(settings.l1.segment_dir) if settings.l1.segment_dir else segment_dir(port, settings.instance_id)
    )
    # No later server would look for the segment of a port that was taken at random.
    forgotten = settings.l1.forget_on_exit or (settings.port == 0 and not settings.l1.segment_dir)
    shared = segment_settings(
        settings,
        plan.extents_bytes,
        directory,
        shm,
        beside_bytes=sum(size.quota_bytes for size in plan.own_sizes.values()),
    )
    segment = Segment.open(shared)
    closers.append(soon(segment.destroy if forgotten else segment.close))
    own = open_own_segments(shared, segment.pool.epoch, plan.own_sizes)
    closers += [soon(one.destroy if forgotten else one.close) for one in own.values()]
    if settings.l1.core_dump:
        try:
            for one in (segment, *own.values()):
                dump_memory(one.pool.extents_address, one.pool.extents_bytes)
        except OSError as error:
            raise SegmentError(
                f"l1.core_dump: L1 cannot be put into core dumps: {error.strerror}; leave the setting out",
                field="l1.core_dump",
            ) from error
    return segment, own, directory
