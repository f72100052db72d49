"""A tier as a stack of named layers, each an adapter around the one before it.

medium     the bare adapter of the entry's type
host       only with `"isolation": "process"`: runs the medium in a process of its own
codec      encodes records that are put, decodes records that are loaded
deadline   ends waits, stops asking an adapter that does not answer, and reports each operation
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvstrata.clock import Clock
from kvstrata.policy.store import StorePolicy
from kvstrata.process.threads import on_a_thread
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.entry import TierConfig
from kvstrata.storage.folder import FolderState, WatchedFolder
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.peers import ReadsPeers
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.storage.wrap.codec_chain import Chain
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits, OpReport

STUCK_SHARE = 16
"""Default of `max_stuck_mb`: L1 divided by this."""
KILL_DEADLINES = 3
"""Default of `host_kill_ms`: this many deadlines."""


class Surroundings(NamedTuple):
    """What the server gives the layers of a tier."""

    clock: Clock
    l1_bytes: int
    report: Callable[[OpReport], None]
    deadline_ms: int = 5_000
    """The deadline of a tier whose entry names none."""

    def limits(self, config: TierConfig) -> DeadlineLimits:
        """The limits of a tier: those of its entry, or the defaults."""
        return DeadlineLimits(
            deadline_ms=config.deadline_ms or self.deadline_ms,
            max_stuck_bytes=config.max_stuck_bytes or self.l1_bytes // STUCK_SHARE,
        )


class Stack:
    """A tier as the server uses it; not open yet."""

    def __init__(
        self,
        name: str,
        policy: StorePolicy,
        codec: CodecAdapter,
        adapter: DeadlineAdapter,
        *,
        host: HostedAdapter | None = None,
        folder: str = "",
    ) -> None:
        """`adapter`: the outermost layer. `host`: None for a tier that is not isolated."""
        self.name = name
        self.policy = policy
        self.codec = codec
        self.adapter = adapter
        self.host = host
        self.folder = WatchedFolder(folder) if folder else None
        """The directory of the medium; None: it has none."""
        self.peers = codec.inner if isinstance(codec.inner, ReadsPeers) else None
        """The medium if it reads other instances, or the host of any isolated medium; None for all other media."""

    async def open(self, context: AdapterContext) -> None:
        """Open the adapter, and mark its directory. Raises as the adapter does; OSError if the directory is gone."""
        await self.adapter.open(context)
        if self.folder is not None:
            try:
                await on_a_thread(self.folder.mark, "mark-folder")
            except OSError:
                await self.adapter.close()
                raise

    async def close(self) -> None:
        """Close the adapter, and let go of its directory."""
        await self.adapter.close()
        if self.folder is not None:
            self.folder.close()

    def status(self) -> dict[str, Any]:
        """For status pages."""
        remarks = self.codec.remarks()
        return {
            "breakers": self.adapter.breaker_states(),
            "stuck_bytes": self.adapter.stuck_bytes,
            **(
                {}
                if self.folder is None
                else {"medium": str(self.folder.state), "medium_well": self.folder.state is FolderState.WELL}
            ),
            "codec": self.codec.stats(),
            "numbers": self.codec.numbers(),
            **({"remarks": remarks} if remarks else {}),
            **({} if self.host is None else {"host": self.host.host_status()}),
        }


def build_stack(config: TierConfig, around: Surroundings) -> Stack:
    """Make the layers of a checked entry, not open. Raises ConfigError if a plugin does."""
    limits = around.limits(config)
    host = None
    if config.isolated:
        host = HostedAdapter(
            config.recipe,
            kill_ms=config.kill_ms or KILL_DEADLINES * limits.deadline_ms,
            bytes_per_kill=limits.bytes_per_deadline,
        )
    inner = host or config.make()
    inner.name = config.name
    codec = CodecAdapter(
        inner,
        Chain(config.chain),
        staging_bytes=config.codec_staging_bytes,
        workers=config.codec_workers,
    )
    adapter = DeadlineAdapter(codec, limits, around.clock, around.report)
    return Stack(config.name, config.policy, codec, adapter, host=host, folder=config.folder)
