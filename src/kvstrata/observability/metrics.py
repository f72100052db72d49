"""Counters of the server and their Prometheus text.

The hot path adds to plain integers; names, help texts and labels are put on when somebody scrapes.  Every
label has a closed set of values: operations, error codes and reasons come from enums, adapters from the
configuration.  There is no label for tenants, requests or keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SECONDS_BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
MAX_OUTCOME_WORDS = 32
"""Outcomes of an adapter's operation that get a label of their own (plugins choose their words)."""


class Family(NamedTuple):
    """One metric family. `labels` in the order of their values."""

    kind: str
    """counter, gauge or histogram; a counter's samples end in `_total`."""
    labels: tuple[str, ...]
    meaning: str


FAMILIES: dict[str, Family] = {
    "kvstrata_instance": Family("gauge", ("instance_id",), "This instance; always 1."),
    "kvstrata_requests": Family("counter", ("op",), "Requests by operation."),
    "kvstrata_errors": Family("counter", ("code",), "Error replies by code."),
    "kvstrata_first_misses": Family("counter", ("reason",), "Lookups by the reason of their first miss."),
    "kvstrata_reserve_outcomes": Family("counter", ("outcome",), "Chunks of reserves by outcome."),
    "kvstrata_put_skipped": Family("counter", ("reason",), "Chunks not put to L2, by reason."),
    "kvstrata_lookup_chunks": Family("counter", (), "Chunks asked for."),
    "kvstrata_l1_hit_chunks": Family("counter", (), "Chunks served that were in L1."),
    "kvstrata_l2_hit_chunks": Family("counter", (), "Chunks served after a load from L2."),
    "kvstrata_revoked_leases": Family(
        "counter", (), "Waiting leases asked back because others needed the room."
    ),
    "kvstrata_committed_chunks": Family("counter", (), "Chunks that became visible."),
    "kvstrata_bad_records": Family("counter", (), "Commits refused because the record was wrong."),
    "kvstrata_retrieved_bytes": Family("counter", (), "Bytes sent by retrieve."),
    "kvstrata_lookup_seconds": Family("histogram", (), "Time from a lookup's arrival to its reply."),
    "kvstrata_l2_seconds": Family("histogram", ("adapter", "operation"), "Time of one batch on an adapter."),
    "kvstrata_l2_bytes": Family("counter", ("adapter", "operation"), "Record bytes moved by an adapter."),
    "kvstrata_l2_items": Family(
        "counter", ("adapter", "operation", "outcome"), "Chunks by outcome of an adapter's operation."
    ),
    "kvstrata_l2_breaker_open": Family(
        "gauge",
        ("adapter", "operation"),
        "1 while an adapter's breaker is open, so that it is not asked, or lets one probe through; else 0.",
    ),
}
"""By name."""

STATUS_NUMBERS: dict[str, str] = {
    "pool.extents_bytes": "Size of L1.",
    "pool.used_bytes": "Bytes of L1 in extents that are taken, whatever their state.",
    "pool.free_bytes": "Bytes of L1 that no extent takes.",
    "pool.slab_bytes": "Size of one slab.",
    "pool.unusable_bytes": "Bytes of slabs in use that are too few for one more extent.",
    "pool.largest_allocatable_bytes": "The longest record that fits now without evicting.",
    "pool.fragmentation": "0 when one record may take all free bytes, towards 1 the smaller the longest that fits.",
    "pool.entry_capacity": "Entries the index has room for.",
    "pool.entries.WORD": "Entries in this state: reserved, ready, unverified or quarantined.",
    "pool.bytes.WORD": "Bytes of the entries in this state.",
    "pool.reserved_bytes": "Bytes that some process may write and nobody can see yet.",
    "pool.quarantined_bytes": "Bytes kept back because somebody may still write them.",
    "pool.leased_bytes": "Bytes that leases keep in place.",
    "pool.pinned_bytes": "Bytes that operations hold while they touch them: puts, loads, retrieves.",
    "pool.blocked_bytes": "Bytes that cannot be evicted now: leased, held or not ready.",
    "pool.leases": "Leases that have not ended.",
    "pool.reservations": "Reservations that have not ended.",
    "pool.holds": "References by operations that touch bytes.",
    "pool.rows_claimed": "Rows of the session table in use: processes that are attached, or were and may still copy.",
    "pool.rows_capacity": "Rows of the session table: so many processes can be attached at a time.",
    "pool.inserted_entries": "Chunks that became visible since the start, loads from L2 included.",
    "pool.inserted_bytes": "Their bytes.",
    "pool.evicted_entries": "Chunks evicted since the start.",
    "pool.evicted_bytes": "Their bytes.",
    "pool.evictions.WORD": "Evictions since the start by cause: policy, window (a whole slab), quota or watermark.",
    "pool.cleared_entries": "Chunks dropped by clear since the start.",
    "pool.corrupt_entries": "Chunks dropped since the start because their checksum was wrong.",
    "pool.quarantined_entries": "Entries put into quarantine since the start.",
    "pool.bad_records": "Commits refused by the pool since the start.",
    "pool.refused.WORD": "Chunks that got no extent since the start, by reason.",
    "pool.leases_trimmed": "Lookups answered shorter since the start because leases keep half of L1 already.",
    "pool.adopted_entries": "Entries taken over from the server before.",
    "pool.adoption_dropped": "Entries of the server before that could not be taken over.",
    "pool.events_lost": "Events of the pool that came faster than they were read.",
    "pool.backed_bytes": "Bytes of L1 that have memory; only these are handed out.",
    "pool.missing_bytes": "Bytes of L1 that got none: its file system (often /dev/shm) is full. 0 is good.",
    "pool.prefaulted_bytes": "Bytes of L1 whose pages are there already.",
    "pool.prefault_error": "The errno that ended that early, 0 for none.",
    "sessions.attached": "Processes attached.",
    "sessions.detached": "Processes that live but whose attach connection is closed.",
    "sessions.groups": "Engines with a process attached.",
    "sessions.leases": "Leases the sessions hold.",
    "sessions.leases_revoked": "Leases asked back that were neither given back nor handed on yet.",
    "sessions.extents_being_written": "Extents reserved and not committed.",
    "sessions.tasks": "Tasks running in the server.",
    "sessions.absent_keys_remembered": "Keys whose reason of absence is remembered for explain.",
    "l2_store.backlog_bytes": "Bytes of L1 pinned because they wait to be put.",
    "l2_store.backlog_limit_bytes": "Most bytes that may wait; more are skipped.",
    "l2_store.adapters.ADAPTER.queued": "Puts that wait for this adapter.",
    "l2_store.adapters.ADAPTER.retrying": "Puts that this adapter throttled and that are tried again.",
    "l2_store.adapters.ADAPTER.in_flight": "Puts under way.",
    "l2_store.adapters.ADAPTER.stored_bytes": "Record bytes stored since the start.",
    "l2_store.adapters.ADAPTER.outcomes.WORD": "Puts by what became of them: stored, exists, throttled, taken_up "
    "(begun late), or `skipped:` and the reason; trimmed: records deleted because their tenant was at its quota.",
    "l2_prefetch.fetches_running": "Lookups and prewarms that load now.",
    "l2_prefetch.keys_loading": "Records being loaded.",
    "l2_prefetch.loaded_bytes": "Record bytes loaded since the start.",
    "l2_prefetch.counts.WORD": "Since the start: fetches, joined (waited for another's load), loaded, and what "
    "failed as `reserve:` or `load:` and the reason.",
    "l2_prefetch.adapters.ADAPTER.loading_bytes": "Bytes being loaded from this adapter.",
    "l2_prefetch.adapters.ADAPTER.waiting": "Fetches that wait for their turn on this adapter.",
    "l2_adapters.ADAPTER.takes_loads": "Whether lookups ask this adapter.",
    "l2_adapters.ADAPTER.stuck_bytes": "Bytes of operations past their deadline that have not ended.",
    "l2_adapters.ADAPTER.codec.WORD": "What its codecs count, and the bytes of their staging that are in use.",
    "l2_adapters.ADAPTER.numbers.WORD": "What the adapter counts itself; see operations.md, remote-tiers.md and "
    "p2p.md.",
    "l2_adapters.ADAPTER.presence.WORD": "Of storage that others share: keys asked of it, keys answered from memory "
    "(recalled_present, recalled_absent), and keys remembered now.",
    "l2_adapters.ADAPTER.host.pid": "Process of an adapter that runs in one of its own; 0 while there is none.",
    "l2_adapters.ADAPTER.host.restarts": "Such processes started since the start in place of one that had ended.",
    "l2_adapters.ADAPTER.host.requests": "What that process was asked and has not ended yet.",
    "numa.sampled_pages.WORD": "Of some pages spread over L1 that the server has touched: those on this NUMA node.",
    "http.connections": "Connections of the admin port now.",
    "http.requests": "Requests of it under way, without probes.",
    "http.refused": "Requests answered with 503 since the start because too many were under way.",
    "http.closed_idle": "Connections closed to make room for a new one: those idle longest.",
    "http.closed_late": "Connections closed because a request took too long to arrive.",
    "http.closed_stalled": "Connections closed because the client did not read its answer.",
    "process.restarts": "Times that its keeper has started the server again because it died.",
    "attach.pending": "Handshakes under way.",
    "attach.attached": "Sessions with an open attach connection.",
    "attach.detached": "Sessions without one whose process lives.",
    "attach.old_rows": "Rows of the server before whose process has neither ended nor come back.",
    "attach.stranded": "Sessions that ended while no server watched and whose device may still write into L1.",
    "attach.stranded_bytes": "Bytes of L1 kept in quarantine because of them, until an admin clears them.",
    "attach.refused.WORD": "Attaches refused since the start, by code; `gave_up`: the process had ended or hung up.",
    "cluster.member": "Whether the controller has let this instance in and has answered since.",
    "cluster.frozen": "Whether stores are refused while the controller takes stock.",
    "cluster.last_event": "Batches of events told to the controller since the start.",
    "cluster.queued_tags": "Chunks whose change the controller was not told yet.",
    "cluster.commands_waiting": "Commands of the controller that run, or whose result it does not have yet.",
    "cluster.registrations": "Registrations with a controller since the start.",
    "cluster.heartbeats": "Heartbeats that were answered since the start.",
    "cluster.unanswered": "Heartbeats that were not.",
    "cluster.event_batches": "Batches of events sent since the start.",
    "cluster.events": "Changes of chunks sent in them.",
    "cluster.syncs": "Full syncs that ended well since the start.",
    "cluster.syncs_failed": "Full syncs that did not.",
    "cluster.freezes": "Full syncs during which stores were refused.",
    "cluster.freezes_cut": "Those that ended because heartbeats were not answered any more.",
    "cluster.overflows": "Times that more changed than could be kept until it was told.",
    "peers_served.leases": "Leases that readers of this instance have now.",
    "peers_served.pins": "Pins of the controller now.",
    "peers_served.leased_bytes": "Bytes of L1 that these keep, each record once.",
    "peers_served.limit_bytes": "As many as they may keep.",
    "peers_served.draining": "Whether peers are leased nothing.",
    "peers_served.read_bytes": "Bytes that readers said that they have read here since the start.",
    "peers_served.granted": "Leases granted since the start.",
    "peers_served.released": "Leases that their reader ended.",
    "peers_served.expired": "Leases that the clock ended.",
    "peers_served.absent": "Requests for leases that named records that are not here.",
    "peers_served.limit": "Requests for leases that the limit cut.",
    "peers_served.draining_refused": "Requests for leases while draining.",
    "peers_served.errors": "Requests of peers that were refused.",
    "peers_served.received": "Frames received from peers since the start.",
    "peers_served.dropped_replies": "Replies to peers that found no receiver, or one that leaves too much unread.",
    "peers_served.unread_reply_bytes": "Bytes of large replies to peers that they have not read yet.",
    "peers_served.refused_handshakes": "Connections of peers that broke off before they had shown the right keys.",
    "peers_served.connections": "Connections of peers now.",
    "peers_served.cut_connections": "Connections of peers cut: one too many, or more sent than may wait.",
    "rpc.received": "Frames received since the start.",
    "rpc.dropped_replies": "Replies that found no receiver, or one that leaves too many bytes unread.",
    "rpc.unread_reply_bytes": "Bytes of large replies that peers have not read yet.",
    "rpc.refused_handshakes": "Connections that broke off before they had shown the right keys.",
    "rpc.connections": "Connections now.",
    "rpc.cut_connections": "Connections cut: one too many, or more sent than may wait.",
}
"""Numbers of the status document that are served as gauges, and what they tell. ADAPTER stands for an adapter's
name (`fs-0`), WORD for one of several words."""


class Histogram:
    """Durations in fixed buckets."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated, as Prometheus wants them."""
        total = 0
        result = []
        for bound, count in zip((*map(str, SECONDS_BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result


class L2Operation:
    """One kind of operation on one adapter."""

    __slots__ = ("moved_bytes", "outcomes", "time")

    def __init__(self) -> None:
        self.time = Histogram()
        self.moved_bytes = 0
        self.outcomes: dict[str, int] = {}


class ServerCounters:
    """What the request path counts."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.lookup_chunks = 0
        self.l1_hit_chunks = 0
        self.l2_hit_chunks = 0
        self.revoked_leases = 0
        self.reserve_outcomes: dict[str, int] = {}
        self.committed_chunks = 0
        self.bad_records = 0
        self.put_skipped: dict[str, int] = {}
        self.retrieved_bytes = 0
        self.lookup = Histogram()
        self.l2: dict[tuple[str, str], L2Operation] = {}

    def l2_operation(
        self, adapter: str, operation: str, seconds: float, moved_bytes: int, outcomes: Mapping[str, int]
    ) -> None:
        """One batch on an adapter ended; `outcomes`: items by outcome's word."""
        counted = self.l2.get((adapter, operation))
        if counted is None:
            counted = self.l2[(adapter, operation)] = L2Operation()
        counted.time.add(seconds)
        counted.moved_bytes += moved_bytes
        for word, count in outcomes.items():
            known = word if word in counted.outcomes or len(counted.outcomes) < MAX_OUTCOME_WORDS else "other"
            counted.outcomes[known] = counted.outcomes.get(known, 0) + count

    def forget_adapter(self, name: str) -> None:
        """An adapter was removed: its name is no label any more."""
        self.l2 = {known: counted for known, counted in self.l2.items() if known[0] != name}

    def as_dict(self) -> dict[str, Any]:
        """For the status document."""
        return {
            "requests": dict(self.requests),
            "errors": dict(self.errors),
            "first_miss_reasons": dict(self.misses),
            "lookup_chunks": self.lookup_chunks,
            "l1_hit_chunks": self.l1_hit_chunks,
            "l2_hit_chunks": self.l2_hit_chunks,
            "revoked_leases": self.revoked_leases,
            "reserve_outcomes": dict(self.reserve_outcomes),
            "committed_chunks": self.committed_chunks,
            "bad_records": self.bad_records,
            "put_skipped": dict(self.put_skipped),
            "retrieved_bytes": self.retrieved_bytes,
        }


class ServerCollector:
    """Registered with a CollectorRegistry; asks the engine at each scrape."""

    def __init__(
        self, instance_id: str, counters: ServerCounters, numbers: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`numbers`: gives sections of the status document. Every number in them becomes a gauge named after
        its path; lists and texts are left out."""
        self._instance_id = instance_id
        self._counters = counters
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        """All metric families now."""
        return families(self._instance_id, self._counters, self._numbers())


def families(instance_id: str, counters: ServerCounters, numbers: Mapping[str, Any]) -> Iterator[Metric]:
    """All metric families, in the order of `FAMILIES`, then the gauges of the status document."""
    from prometheus_client.core import GaugeMetricFamily

    for name, values in _counted(instance_id, counters, numbers).items():
        yield metric_of(name, FAMILIES[name], values)
    for path, number in numbers_in(numbers):
        yield GaugeMetricFamily(gauge_name(path), meaning_of(path), value=number)


def metric_of(name: str, family: Family, values: Iterable[tuple[list[str], Any]]) -> Metric:
    """A family with its samples: label values, and a number or a Histogram each."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.meaning, labels=family.labels)
        for labels, time in values:
            histogram.add_metric(labels, buckets=time.buckets(), sum_value=time.sum_s)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(name, family.meaning, labels=family.labels)
    for labels, count in values:
        metric.add_metric(labels, count)
    return metric


def _counted(
    instance_id: str, counters: ServerCounters, numbers: Mapping[str, Any]
) -> dict[str, list[tuple[list[str], Any]]]:
    """(label values, number or Histogram) of each family in `FAMILIES`, in its order."""

    def by_word(values: Mapping[str, int]) -> list[tuple[list[str], Any]]:
        return [([word], count) for word, count in sorted(values.items())]

    l2 = [(list(name), counted) for name, counted in sorted(counters.l2.items())]
    return {
        "kvstrata_instance": [([instance_id], 1.0)],
        "kvstrata_requests": by_word(counters.requests),
        "kvstrata_errors": by_word(counters.errors),
        "kvstrata_first_misses": by_word(counters.misses),
        "kvstrata_reserve_outcomes": by_word(counters.reserve_outcomes),
        "kvstrata_put_skipped": by_word(counters.put_skipped),
        "kvstrata_lookup_chunks": [([], counters.lookup_chunks)],
        "kvstrata_l1_hit_chunks": [([], counters.l1_hit_chunks)],
        "kvstrata_l2_hit_chunks": [([], counters.l2_hit_chunks)],
        "kvstrata_revoked_leases": [([], counters.revoked_leases)],
        "kvstrata_committed_chunks": [([], counters.committed_chunks)],
        "kvstrata_bad_records": [([], counters.bad_records)],
        "kvstrata_retrieved_bytes": [([], counters.retrieved_bytes)],
        "kvstrata_lookup_seconds": [([], counters.lookup)],
        "kvstrata_l2_seconds": [(labels, counted.time) for labels, counted in l2],
        "kvstrata_l2_bytes": [(labels, counted.moved_bytes) for labels, counted in l2],
        "kvstrata_l2_items": [
            ([*labels, word], count)
            for labels, counted in l2
            for word, count in sorted(counted.outcomes.items())
        ],
        "kvstrata_l2_breaker_open": [
            ([adapter, operation], float(state != "closed"))
            for adapter, status in numbers.get("l2_adapters", {}).items()
            for operation, state in status.get("breakers", {}).items()
        ],
    }


def numbers_in(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """(dotted path, value) of every number in a nested document; dots in a key become underscores."""
    for key, value in document.items():
        path = above + str(key).replace(".", "_")
        if isinstance(value, Mapping):
            yield from numbers_in(value, path + ".")
        elif isinstance(value, bool | int | float):
            yield path, float(value)


def gauge_name(path: str) -> str:
    """The metric that carries the number at this path of the status document."""
    return "kvstrata_" + "".join(character if character.isalnum() else "_" for character in path)


def meaning_of(path: str) -> str:
    """What the number at this path of the status document tells; a plain reference where nothing more is known."""
    for pattern, meaning in STATUS_NUMBERS.items():
        parts, known = path.split("."), pattern.split(".")
        if len(parts) == len(known) and all(
            k in ("ADAPTER", "WORD", p) for p, k in zip(parts, known, strict=True)
        ):
            return meaning
    return "From the status document."
