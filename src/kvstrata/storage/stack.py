"""A tier as a stack of named layers, each an adapter around the one before it.

    medium     the bare adapter of the entry's type
    host       only with `"isolation": "process"`: runs the medium in a process of its own
    codec      encodes records that are put, decodes records that are loaded
    deadline   ends waits, and stops asking an adapter that does not answer
    metrics    reports each operation

`Stack.describe` tells which layers a tier has and where they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvstrata.clock import Clock
from kvstrata.policy.store import StorePolicy
from kvstrata.process.threads import on_a_thread
from kvstrata.storage.base import AdapterContext, StorageAdapter
from kvstrata.storage.entry import TierConfig
from kvstrata.storage.folder import FolderState, WatchedFolder
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.peers import ReadsPeers
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.storage.wrap.codec_chain import Chain
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.storage.wrap.metrics import MeteredAdapter, OpReport

T = TypeVar("T")

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


class Layer(NamedTuple):
    """One layer of a tier."""

    name: str
    adapter: StorageAdapter | None
    """None: the layer is in the child process, behind the layer `host`."""


class Stack:
    """A tier as the server uses it; not open yet."""

    def __init__(self, name: str, policy: StorePolicy, layers: Sequence[Layer], folder: str = "") -> None:
        """`layers` from the storage outwards; the last one is in this process."""
        self.name = name
        self.policy = policy
        self.layers = tuple(layers)
        self.folder = WatchedFolder(folder) if folder else None
        """The directory of the medium; None: it has none."""
        outermost = layers[-1].adapter
        assert outermost is not None
        self.adapter = outermost
        guard = self._layer(DeadlineAdapter)
        assert guard is not None
        self.guard = guard
        """The layer that has the breakers and counts stuck bytes."""
        self.host = self._layer(HostedAdapter)
        """None: the tier is not isolated."""
        codec = self._layer(CodecAdapter)
        assert codec is not None
        self.codec = codec
        self.peers = self._layer(ReadsPeers)  # type: ignore[type-abstract]
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

    def describe(self) -> list[dict[str, str]]:
        """For each layer from the storage outwards: its name, the process that runs it, and its class if known here."""
        return [
            {
                "layer": layer.name,
                "process": "host" if layer.adapter is None else "server",
                "adapter": "" if layer.adapter is None else type(layer.adapter).__name__,
            }
            for layer in self.layers
        ]

    def status(self) -> dict[str, Any]:
        """For status pages."""
        remarks = self.codec.remarks()
        return {
            "breakers": self.guard.breaker_states(),
            "stuck_bytes": self.guard.stuck_bytes,
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

    def _layer(self, kind: type[T]) -> T | None:
        return next((layer.adapter for layer in self.layers if isinstance(layer.adapter, kind)), None)


def build_stack(config: TierConfig, around: Surroundings) -> Stack:
    """Make the layers of a checked entry, not open. Raises ConfigError if a plugin does."""
    limits = around.limits(config)
    if config.isolated:
        layers = [Layer("medium", None)]
        inner: StorageAdapter = HostedAdapter(
            config.recipe,
            kill_ms=config.kill_ms or KILL_DEADLINES * limits.deadline_ms,
            bytes_per_kill=limits.bytes_per_deadline,
        )
        layers.append(Layer("host", inner))
    else:
        inner = config.make()
        inner.name = config.name
        layers = [Layer("medium", inner)]
    codec = config.recipe.codec
    encoding = CodecAdapter(
        inner, Chain(codec.chain), staging_bytes=codec.staging_bytes, workers=codec.workers
    )
    guard = DeadlineAdapter(encoding, limits, around.clock)
    metered = MeteredAdapter(guard, around.report, around.clock)
    layers += [Layer("codec", encoding), Layer("deadline", guard), Layer("metrics", metered)]
    return Stack(config.name, config.policy, layers, config.folder)
