"""The instance's condition, as reported to its followers: how full its tiers are, its counters, its engines' models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstrata.p2p.serving import PeersServed
from kvstrata.rpc import cluster_wire
from kvstrata.rpc.cluster_wire import MAX_ADAPTER_CHARS, MAX_ADAPTERS, MAX_ENGINES, KvKind, Load, TierRate
from kvstrata.rpc.wire import LoadRate
from kvstrata.server.cluster.held import L1_TIER, HeldChunks
from kvstrata.server.processes import EngineGroup
from kvstrata.types import LayoutIdentity

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

MAX_MODELS = 64


class Condition:
    """Reads the condition of one instance."""

    def __init__(self, parts: Parts, held: HeldChunks, peers: PeersServed) -> None:
        self._pool, self._processes, self._counters = parts.pool, parts.processes, parts.counters
        self._held, self._peers, self._peer_reads = held, peers, parts.peer_reads
        self._tiers, self._readiness, self._frozen_by = parts.tiers, parts.readiness, parts.frozen_by

    def now(self, obeys: tuple[int, int]) -> cluster_wire.Condition:
        """The complete condition; `obeys`: the latest leadership that the instance knows."""
        return cluster_wire.Condition(
            self._word(), self._load(), self._models(), obeys, self.draining, self._engines(), self._rates()
        )

    def _word(self) -> str:
        if not self._readiness.ready:
            return "stopping"
        if self._frozen_by:
            return "frozen"
        return "draining" if self.draining else "ready"

    @property
    def draining(self) -> bool:
        """Whether the instance sends nothing to peers."""
        return self._peers.draining

    def _load(self) -> Load:
        l1 = self._pool.stats()
        counters = self._counters
        peer_chunks, peer_bytes = self._peer_reads.loads()
        sending_bytes, sent_bytes = self._peers.sending()
        usage = self._held.usage()
        return Load(
            used_bytes={L1_TIER: l1["used_bytes"], **{tier: one.used_bytes for tier, one in usage.items()}},
            capacity_bytes={
                L1_TIER: self._pool.extents_bytes,
                **{tier: one.capacity_bytes for tier, one in usage.items() if one.capacity_bytes},
            },
            hits_total={
                "l1": counters.l1_hit_chunks,
                "l2": max(0, counters.l2_hit_chunks - peer_chunks),
                "peer": peer_chunks,
                "miss": counters.lookup_chunks - counters.l1_hit_chunks - counters.l2_hit_chunks,
            },
            peer_sending_bytes=sending_bytes,
            peer_sent_bytes_total=sent_bytes,
            peer_read_bytes_total=peer_bytes,
            sessions=len(list(self._processes)),
            tier_states=self._held.states(),
            saved={f"{size:g}": min(1.0, max(0.0, saved)) for size, _, saved in self._pool.forecasts()[0]},
        )

    def _models(self) -> list[KvKind]:
        """Models of which an engine is attached with all of its slices."""
        found: dict[tuple[LayoutIdentity, bytes], list[EngineGroup]] = {}
        for group in self._processes.groups:
            if group.complete:
                found.setdefault((group.layout, group.packed_slices), []).append(group)
        kinds = []
        left = MAX_ADAPTERS
        for groups in list(found.values())[:MAX_MODELS]:
            last, adapters = groups[-1], _adapters(groups)[:left]
            left -= len(adapters)
            kinds.append(KvKind(last.layout, last.slices, list(last.spans), last.record_limits, adapters))
        return kinds

    def _rates(self) -> list[TierRate]:
        """Load rates: L2 to L1 (of the adapter with the most loads), peers to L1, and L1 to engines (of the slowest).

        Rates that were not measured are omitted.
        """
        peer, lines = self._peer_reads.name, {tier.name: tier.load_times for tier in self._tiers}
        of_l2 = [line for name, line in lines.items() if name != peer]
        busiest = max(of_l2, key=lambda line: line.batches, default=None)
        found = {
            tier: line.fitted()
            for tier, line in (("l2", busiest), ("peer", lines.get(peer)))
            if line is not None
        }
        # A process restricted to some tenants could report false rates, which would route other tenants' requests.
        of_engines = [
            rate
            for group in self._processes.groups
            if (rate := group.load_rate) is not None
            and all(process.tenants is None for process in group.members.values())
        ]
        found["l1"] = min(of_engines, key=lambda rate: rate[1], default=None)
        rates = []
        for tier, fitted in found.items():
            if fitted is not None:
                told = LoadRate.of(*fitted)
                rates.append(TierRate(tier, told.latency_us, told.bytes_s))
        return rates

    def _engines(self) -> list[str]:
        """URLs that engines have reported, sorted.

        A process restricted to some tenants is ignored, since it could direct other tenants' requests to its URL.
        """
        told = {one.declared.engine_url for one in self._processes if one.tenants is None}
        return sorted(told - {""})[:MAX_ENGINES]


def _adapters(groups: Iterable[EngineGroup]) -> list[str]:
    """The adapters of engines' requests, the newest first; engines restricted to some tenants are ignored."""
    told = [
        group.adapters
        for group in groups
        if all(process.tenants is None for process in group.members.values())
    ]
    newest = itertools.chain.from_iterable(itertools.zip_longest(*told))
    return list(dict.fromkeys(one for one in newest if one is not None and len(one) <= MAX_ADAPTER_CHARS))
