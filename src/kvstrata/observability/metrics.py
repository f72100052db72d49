"""Counters of the server and their Prometheus text.

The hot path only increments plain integers; names, help texts and labels are added during a scrape.  Every
label has a closed set of values: operations, error codes and reasons come from enums, adapter names from the
configuration.  No label carries a tenant, a request or a key.
"""

from __future__ import annotations

import re
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
"""Most outcomes of an adapter's operation that get a label of their own; plugins may invent any number of outcomes."""
OUTCOME_WORD = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
"""Outcomes that can be a label; any other counts as `other`."""


class Family(NamedTuple):
    """One metric family. `labels` are in the order of the values that a sample gives."""

    kind: str
    """counter, gauge or histogram; a counter's samples end in `_total`."""
    labels: tuple[str, ...]
    meaning: str


FAMILIES: dict[str, Family] = {
    "kvstrata_instance": Family("gauge", ("instance_id",), "This instance; always 1."),
    "kvstrata_requests": Family("counter", ("op",), "Requests by operation."),
    "kvstrata_errors": Family("counter", ("code",), "Error replies by code."),
    "kvstrata_wrong_proofs": Family(
        "counter",
        (),
        "Requests refused because they did not prove that they came from the session that they named.",
    ),
    "kvstrata_first_misses": Family("counter", ("reason",), "Lookups by the reason of their first miss."),
    "kvstrata_reserve_outcomes": Family(
        "counter", ("outcome",), "Chunks that reserves asked for, by outcome."
    ),
    "kvstrata_put_skipped": Family("counter", ("reason",), "Chunks not put to L2, by reason."),
    "kvstrata_lookup_chunks": Family("counter", (), "Chunks that lookups asked for."),
    "kvstrata_l1_hit_chunks": Family("counter", (), "Chunks served from L1."),
    "kvstrata_l2_hit_chunks": Family("counter", (), "Chunks served after a load from L2."),
    "kvstrata_revoked_leases": Family(
        "counter", (), "Leases revoked before a copy began, because other requests needed the space."
    ),
    "kvstrata_committed_chunks": Family("counter", (), "Chunks that became visible."),
    "kvstrata_bad_records": Family(
        "counter", (), "Commits refused because the record did not match its reservation."
    ),
    "kvstrata_own_pool_bytes": Family("gauge", ("tenant",), "Memory that a tenant's own pool may have."),
    "kvstrata_own_pool_used_bytes": Family(
        "gauge", ("tenant",), "Bytes of a tenant's own pool occupied by extents in any state."
    ),
    "kvstrata_own_pool_evicted_entries": Family(
        "counter", ("tenant",), "Chunks evicted from a tenant's own pool."
    ),
    "kvstrata_own_pool_lent_bytes": Family(
        "gauge",
        ("tenant",),
        "Bytes of a tenant's own pool kept by readers' leases and the controller's pins.",
    ),
    "kvstrata_retrieved_bytes": Family("counter", (), "Bytes sent by retrieve."),
    "kvstrata_lookup_seconds": Family("histogram", (), "Time from a lookup's arrival to its reply."),
    "kvstrata_l2_seconds": Family(
        "histogram", ("adapter", "operation"), "Duration of one batch on an adapter."
    ),
    "kvstrata_l2_bytes": Family("counter", ("adapter", "operation"), "Record bytes moved by an adapter."),
    "kvstrata_l2_items": Family(
        "counter", ("adapter", "operation", "outcome"), "Chunks by outcome of an adapter's operation."
    ),
    "kvstrata_l2_breaker_open": Family(
        "gauge",
        ("adapter", "operation"),
        "1 while an adapter's breaker is open (it is not asked) or probing (one request is let through); else 0.",
    ),
}
"""By name."""

_OF_OWN_POOL = {
    "bytes": "limit_bytes",
    "used_bytes": "used_bytes",
    "evicted_entries": "evicted_entries",
}
"""What follows `kvstrata_own_pool_` → number of a row of the status's section `own_pools`."""

STATUS_NUMBERS: dict[str, str] = {
    "pool.extents_bytes": "Size of L1.",
    "pool.limit_bytes": "Memory that L1 may have now: its size, or less while tenants' own pools have more than at the "
    "start.",
    "pool.used_bytes": "Bytes of L1 occupied by extents in any state.",
    "pool.free_bytes": "Bytes of L1 occupied by no extent.",
    "pool.slab_bytes": "Size of one slab.",
    "pool.unusable_bytes": "Bytes left over in slabs that are in use, too few for one more extent.",
    "pool.largest_allocatable_bytes": "Length of the longest record that fits now without an eviction.",
    "pool.fragmentation": "0 when a single record could occupy all free bytes; approaches 1 as "
    "the longest record that fits gets shorter.",
    "pool.entry_capacity": "Entries that the index has room for.",
    "pool.entries.WORD": "Entries in this state: reserved, ready, unverified or quarantined.",
    "pool.bytes.WORD": "Bytes of the entries in this state.",
    "pool.reserved_bytes": "Bytes that a process may be writing and that no lookup can see yet.",
    "pool.quarantined_bytes": "Bytes withheld from use because a process that is gone or unknown "
    "may still write them.",
    "pool.leased_bytes": "Bytes that leases keep in place.",
    "pool.pinned_bytes": "Bytes that operations hold while they touch them: puts, loads, retrieves.",
    "pool.blocked_bytes": "Bytes that cannot be evicted now because they are leased, held or not ready.",
    "pool.leases": "Leases that have not ended.",
    "pool.reservations": "Reservations that have not ended.",
    "pool.holds": "References held by operations that are touching bytes.",
    "pool.rows_claimed": "Rows of the session table in use: processes that are attached, or that "
    "have ended but whose copies may still run.",
    "pool.rows_capacity": "Rows of the session table, which limit how many processes can be attached at a time.",
    "pool.inserted_entries": "Chunks that became visible since the start, including those loaded from L2.",
    "pool.inserted_bytes": "Bytes of the chunks that became visible since the start.",
    "pool.evicted_entries": "Chunks evicted since the start.",
    "pool.evicted_bytes": "Bytes of the chunks evicted since the start.",
    "pool.evictions.WORD": "Evictions since the start by cause: policy, window (a whole slab), quota or watermark.",
    "pool.cleared_entries": "Chunks dropped by a clear since the start.",
    "pool.corrupt_entries": "Chunks dropped since the start because their checksum was wrong.",
    "pool.quarantined_entries": "Entries put into quarantine since the start.",
    "pool.bad_records": "Commits that the pool refused since the start because the record did not "
    "match its reservation.",
    "pool.refused.WORD": "Chunks that were given no extent since the start, by reason.",
    "pool.leases_trimmed": "Lookups shortened since the start because leases already covered half of L1.",
    "pool.adopted_entries": "Entries taken over from the previous server.",
    "pool.adoption_dropped": "Entries of the previous server that could not be taken over.",
    "pool.events_lost": "Pool events that were dropped because they arrived faster than they were read.",
    "pool.backed_bytes": "Bytes of L1 that have memory behind them; only these are handed out.",
    "pool.missing_bytes": "Bytes of L1 without memory because its file system (often /dev/shm) is full; should be 0.",
    "pool.prefaulted_bytes": "Bytes of L1 whose pages have been faulted in.",
    "pool.prefault_error": "The errno that ended prefaulting early; 0 if none did.",
    "sessions.attached": "Attached processes.",
    "sessions.detached": "Processes that are alive but whose attach connection is closed.",
    "sessions.groups": "Engines with at least one attached process.",
    "sessions.leases": "Leases held by sessions.",
    "sessions.leases_revoked": "Revoked leases that have been neither returned nor handed on yet.",
    "sessions.extents_being_written": "Extents that are reserved and not committed.",
    "sessions.tasks": "Tasks running in the server.",
    "sessions.absent_keys_remembered": "Absent keys whose reason is remembered for `explain`.",
    "l2_store.backlog_bytes": "Bytes of L1 that stay pinned because they are waiting to be put.",
    "l2_store.backlog_limit_bytes": "Limit of the bytes waiting to be put; chunks beyond it are skipped.",
    "l2_store.adapters.ADAPTER.queued": "Puts waiting for this adapter.",
    "l2_store.adapters.ADAPTER.retrying": "Puts that this adapter throttled and that will be tried again.",
    "l2_store.adapters.ADAPTER.in_flight": "Puts in progress.",
    "l2_store.adapters.ADAPTER.stored_bytes": "Record bytes stored since the start.",
    "l2_store.adapters.ADAPTER.outcomes.WORD": "Puts by outcome: stored, exists, "
    "throttled, taken_up (begun late), or `skipped:` and the reason; trimmed: records deleted because "
    "their tenant was at its quota.",
    "l2_prefetch.fetches_running": "Lookups and prewarms that are loading now.",
    "l2_prefetch.keys_loading": "Records being loaded.",
    "l2_prefetch.loaded_bytes": "Record bytes loaded since the start.",
    "l2_prefetch.counts.WORD": "Since the start: fetches, joined (waited for the load of another fetch), "
    "loaded, and failures as `reserve:` or `load:` and the reason.",
    "l2_prefetch.adapters.ADAPTER.loading_bytes": "Bytes being loaded from this adapter.",
    "l2_prefetch.adapters.ADAPTER.waiting": "Fetches that wait for their turn on this adapter.",
    "l2_adapters.ADAPTER.takes_loads": "1 if lookups ask this adapter, else 0.",
    "l2_adapters.ADAPTER.medium_well": "1 while the tier's directory is there and can be written to, else 0.",
    "l2_adapters.ADAPTER.stuck_bytes": "Bytes of operations that are past their deadline and have not ended.",
    "l2_adapters.ADAPTER.codec.WORD": "Counters of the adapter's codecs, and the staging bytes that they use now.",
    "l2_adapters.ADAPTER.numbers.WORD": "Counters of the adapter itself; see operations.md, "
    "remote-tiers.md and p2p.md.",
    "l2_adapters.ADAPTER.presence.WORD": "For storage shared with other servers: keys that the storage was "
    "asked for, keys answered from memory (recalled_present, recalled_absent), and keys remembered "
    "now.",
    "l2_adapters.ADAPTER.host.pid": "Process id of the adapter host; 0 while none runs or if "
    "the adapter has none.",
    "l2_adapters.ADAPTER.host.restarts": "Adapter hosts that were started in place of one that had ended.",
    "l2_adapters.ADAPTER.host.requests": "Requests to the adapter host that have not ended.",
    "numa.sampled_pages.WORD": "Pages on this NUMA node, from a sample spread over the part of L1 "
    "that the server has touched.",
    "http.connections": "Open connections of the admin port.",
    "http.requests": "Requests in progress on the admin port, not counting probes.",
    "http.refused": "Requests answered with 503 since the start because too many were in progress.",
    "http.closed_idle": "Connections closed since the start to make room for new ones, the longest idle first.",
    "http.closed_late": "Connections closed since the start because a request took too long to arrive.",
    "http.closed_stalled": "Connections closed since the start because the client did not read the response.",
    "http.closed_stranger": "Connections closed since the start because a process of another user opened them.",
    "process.restarts": "Times that the supervising process has restarted the server because it died.",
    "log.dropped_lines": "Log lines dropped since the start, because the reader of the log had stopped reading or was "
    "gone.",
    "log.waiting_bytes": "Bytes of log lines that wait for the reader of the log.",
    "attach.pending": "Handshakes in progress.",
    "attach.attached": "Sessions with an open attach connection.",
    "attach.detached": "Sessions without an open attach connection whose process is alive.",
    "attach.old_rows": "Rows of the previous server whose process has neither ended nor re-attached.",
    "attach.stranded": "Sessions that ended while no server was watching and whose device may still write into L1.",
    "attach.stranded_bytes": "Bytes of L1 kept in quarantine for stranded sessions until an admin clears them.",
    "attach.refused.WORD": "Attaches refused since the start, by code; `gave_up`: the process "
    "ended or hung up first.",
    "cluster.member": "1 if the controller has accepted this instance and has answered since, else 0.",
    "cluster.frozen": "1 while stores are refused during a full sync, else 0.",
    "cluster.last_event": "Sequence number of the last batch of events sent to the controller.",
    "cluster.queued_tags": "Chunks with a change that the controller has not been told yet.",
    "cluster.commands_waiting": "Commands of the controller that are running or whose result it does not have yet.",
    "cluster.registrations": "Registrations with a controller since the start.",
    "cluster.heartbeats": "Heartbeats answered since the start.",
    "cluster.unanswered": "Heartbeats not answered since the start.",
    "cluster.event_batches": "Batches of events sent since the start.",
    "cluster.events": "Changes of chunks sent in batches of events since the start.",
    "cluster.syncs": "Full syncs that succeeded since the start.",
    "cluster.syncs_failed": "Full syncs that failed since the start.",
    "cluster.freezes": "Full syncs since the start during which stores were refused.",
    "cluster.freezes_cut": "Freezes ended early since the start because heartbeats were no longer answered.",
    "cluster.overflows": "How often more changes piled up than could be kept for the controller.",
    "peers_served.leases": "Leases that readers hold on chunks of this instance.",
    "peers_served.pins": "Pins that the controller holds on chunks of this instance.",
    "peers_served.leased_bytes": "Bytes of L1 kept by readers' leases and the controller's pins, each record once.",
    "peers_served.limit_bytes": "Most bytes of L1 that readers' leases and the controller's pins may keep.",
    "peers_served.draining": "1 while peers are granted no leases, else 0.",
    "peers_served.read_bytes": "Bytes that readers have reported as read from here since the start.",
    "peers_served.granted": "Leases granted since the start.",
    "peers_served.released": "Leases ended by their reader since the start.",
    "peers_served.expired": "Leases that expired since the start.",
    "peers_served.absent": "Lease requests since the start for records that are not here.",
    "peers_served.limit": "Lease requests shortened since the start by the limit.",
    "peers_served.draining_refused": "Lease requests refused since the start while draining.",
    "peers_served.errors": "Requests of peers refused since the start.",
    "peers_served.received": "Frames received from peers since the start.",
    "peers_served.dropped_replies": "Replies to peers dropped since the start because the "
    "receiver was gone or left too much unread.",
    "peers_served.unread_reply_bytes": "Bytes of large replies that peers have not read yet.",
    "peers_served.refused_handshakes": "Connections from peers that ended before they had proved the right keys.",
    "peers_served.connections": "Open connections from peers.",
    "peers_served.cut_connections": "Connections from peers cut since the start: over the limit, "
    "or with more unprocessed bytes than allowed.",
    "rpc.received": "Frames received since the start.",
    "rpc.dropped_replies": "Replies dropped since the start because the receiver was gone or left too much unread.",
    "rpc.unread_reply_bytes": "Bytes of large replies that clients have not read yet.",
    "rpc.refused_handshakes": "Connections that ended before they had proved the right keys.",
    "rpc.connections": "Open connections.",
    "rpc.cut_connections": "Connections cut since the start: over the limit, with more unprocessed bytes than allowed, "
    "or with nothing but refused messages.",
}
"""Numbers of the status document that are served as gauges, with their meaning. ADAPTER stands for the name of an
adapter (`fs-0`), WORD for one of several words."""


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
        """Cumulative counts by upper bound, as Prometheus expects them."""
        total = 0
        result = []
        for bound, count in zip((*map(str, SECONDS_BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result


def count_word(counts: dict[str, int], word: str, count: int = 1) -> None:
    """Count a word that a plugin may have chosen; `other` if it cannot be a label, or would be one label too many."""
    if word not in counts and (len(counts) >= MAX_OUTCOME_WORDS or not OUTCOME_WORD.fullmatch(word)):
        word = "other"
    counts[word] = counts.get(word, 0) + count


class L2Operation:
    """One kind of operation on one adapter."""

    __slots__ = ("moved_bytes", "outcomes", "time")

    def __init__(self) -> None:
        self.time = Histogram()
        self.moved_bytes = 0
        self.outcomes: dict[str, int] = {}


class ServerCounters:
    """Counters of requests and L2 operations."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.wrong_proofs = 0
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
        """Count one batch that an adapter has ended; `outcomes` maps the word of an outcome to its number of items."""
        counted = self.l2.get((adapter, operation))
        if counted is None:
            counted = self.l2[(adapter, operation)] = L2Operation()
        counted.time.add(seconds)
        counted.moved_bytes += moved_bytes
        for word, count in outcomes.items():
            count_word(counted.outcomes, word, count)

    def forget_adapter(self, name: str) -> None:
        """Drop the counters of an adapter that was removed, so that its name is no longer a label."""
        self.l2 = {known: counted for known, counted in self.l2.items() if known[0] != name}

    def as_dict(self) -> dict[str, Any]:
        """The counters by name, for the status document; histograms and L2 operations are not among them."""
        return {
            "requests": dict(self.requests),
            "errors": dict(self.errors),
            "wrong_proofs": self.wrong_proofs,
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
    """A collector for a prometheus_client CollectorRegistry: reads counters and status document at each scrape."""

    def __init__(
        self, instance_id: str, counters: ServerCounters, numbers: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`numbers` returns sections of the status document. Every number in them becomes a gauge named after
        its path; lists and texts are ignored."""
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

    own_pools = numbers.get("own_pools", [])
    l2 = [(list(name), counted) for name, counted in sorted(counters.l2.items())]
    return {
        "kvstrata_instance": [([instance_id], 1.0)],
        "kvstrata_requests": by_word(counters.requests),
        "kvstrata_errors": by_word(counters.errors),
        "kvstrata_wrong_proofs": [([], counters.wrong_proofs)],
        "kvstrata_first_misses": by_word(counters.misses),
        "kvstrata_reserve_outcomes": by_word(counters.reserve_outcomes),
        "kvstrata_put_skipped": by_word(counters.put_skipped),
        "kvstrata_lookup_chunks": [([], counters.lookup_chunks)],
        "kvstrata_l1_hit_chunks": [([], counters.l1_hit_chunks)],
        "kvstrata_l2_hit_chunks": [([], counters.l2_hit_chunks)],
        "kvstrata_revoked_leases": [([], counters.revoked_leases)],
        "kvstrata_committed_chunks": [([], counters.committed_chunks)],
        "kvstrata_bad_records": [([], counters.bad_records)],
        **{
            f"kvstrata_own_pool_{name}": [([row["tenant"]], row[number]) for row in own_pools]
            for name, number in _OF_OWN_POOL.items()
        },
        "kvstrata_own_pool_lent_bytes": [
            ([row["tenant"]], row["leased_bytes"])
            for row in numbers.get("peers_served", {}).get("own_pools", [])
        ],
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
    return "kvstrata_" + re.sub("[^A-Za-z0-9]", "_", path)


def meaning_of(path: str) -> str:
    """The meaning of the number at this path of the status document; a generic sentence for an unknown path."""
    for pattern, meaning in STATUS_NUMBERS.items():
        parts, known = path.split("."), pattern.split(".")
        if len(parts) == len(known) and all(
            k in ("ADAPTER", "WORD", p) for p, k in zip(parts, known, strict=True)
        ):
            return meaning
    return "From the status document."
