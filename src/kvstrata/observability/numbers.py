"""The numbers of the status document that are metrics, each with its path, its metric and its meaning."""

from __future__ import annotations

from typing import NamedTuple


class Number(NamedTuple):
    """The metric that shows a number of the status document."""

    name: str
    """Without the prefix `kvstrata_`; the name of a counter ends in `_total`."""
    meaning: str
    label: str = ""
    """The label that has WORD as its value."""


STATUS_NUMBERS: dict[str, Number] = {
    "pool.extents_bytes": Number("pool_extents_bytes", "Size of L1."),
    "pool.used_bytes": Number("pool_used_bytes", "Bytes of L1 occupied by extents in any state."),
    "pool.free_bytes": Number("pool_free_bytes", "Bytes of L1 occupied by no extent."),
    "pool.slab_bytes": Number("pool_slab_bytes", "Size of one slab."),
    "pool.unusable_bytes": Number(
        "pool_unusable_bytes", "Bytes left over in slabs that are in use, too few for one more extent."
    ),
    "pool.largest_allocatable_bytes": Number(
        "pool_largest_allocatable_bytes", "Length of the longest record that fits now without an eviction."
    ),
    "pool.fragmentation": Number(
        "pool_fragmentation_ratio",
        "0 when a single record could occupy all free bytes; approaches 1 as the longest record that "
        "fits gets shorter.",
    ),
    "pool.entry_capacity": Number("pool_entry_capacity", "Entries that the index has room for."),
    "pool.entries.WORD": Number(
        "pool_entries", "Entries in this state: reserved, ready, unverified or quarantined.", "state"
    ),
    "pool.bytes.WORD": Number("pool_entry_bytes", "Bytes of the entries in this state.", "state"),
    "pool.tails.entries": Number("pool_tails", "Tails in L1: unfinished last chunks of prompts."),
    "pool.tails.record_bytes": Number("pool_tail_record_bytes", "Bytes of the records of tails."),
    "pool.tails.extent_bytes": Number("pool_tail_extent_bytes", "Bytes of the extents of tails."),
    "pool.reserved_bytes": Number(
        "pool_reserved_bytes", "Bytes that a process may be writing and that no lookup can see yet."
    ),
    "pool.quarantined_bytes": Number(
        "pool_quarantined_bytes",
        "Bytes withheld from use because a process that is gone or unknown may still write them.",
    ),
    "pool.leased_bytes": Number("pool_leased_bytes", "Bytes that leases keep in place."),
    "pool.pinned_bytes": Number(
        "pool_pinned_bytes", "Bytes that operations hold while they touch them: puts, loads, retrieves."
    ),
    "pool.blocked_bytes": Number(
        "pool_blocked_bytes", "Bytes that cannot be evicted now because they are leased, held or not ready."
    ),
    "pool.leases": Number("pool_leases", "Leases that have not ended."),
    "pool.reservations": Number("pool_reservations", "Reservations that have not ended."),
    "pool.holds": Number("pool_holds", "References held by operations that are touching bytes."),
    "pool.rows_claimed": Number(
        "pool_rows_claimed",
        "Rows of the session table in use: processes that are attached, or that have ended but whose "
        "copies may still run.",
    ),
    "pool.rows_capacity": Number(
        "pool_rows_capacity",
        "Rows of the session table, which limit how many processes can be attached at a time.",
    ),
    "pool.inserted_entries": Number(
        "pool_inserted_entries_total", "Chunks that became visible, including those loaded from L2."
    ),
    "pool.inserted_bytes": Number("pool_inserted_bytes_total", "Bytes of the chunks that became visible."),
    "pool.evicted_entries": Number("pool_evicted_entries_total", "Chunks evicted."),
    "pool.evicted_bytes": Number("pool_evicted_bytes_total", "Bytes of the chunks evicted."),
    "pool.evictions.WORD": Number(
        "pool_evictions_total",
        "Evictions by cause: policy, window (a whole slab), quota or watermark.",
        "cause",
    ),
    "pool.cleared_entries": Number("pool_cleared_entries_total", "Chunks dropped by a clear."),
    "pool.corrupt_entries": Number(
        "pool_corrupt_entries_total", "Chunks dropped because their checksum was wrong."
    ),
    "pool.quarantined_entries": Number("pool_quarantined_entries_total", "Entries put into quarantine."),
    "pool.bad_records": Number(
        "pool_bad_records_total",
        "Commits that the pool refused because the record did not match its reservation.",
    ),
    "pool.refused.WORD": Number(
        "pool_refused_entries_total", "Chunks that were given no extent, by reason.", "reason"
    ),
    "pool.leases_trimmed": Number(
        "pool_trimmed_leases_total", "Lookups shortened because leases already covered half of L1."
    ),
    "pool.adopted_entries": Number(
        "pool_adopted_entries_total", "Entries taken over from the previous server."
    ),
    "pool.adoption_dropped": Number(
        "pool_dropped_adoptions_total", "Entries of the previous server that could not be taken over."
    ),
    "pool.events_lost": Number(
        "pool_lost_events_total",
        "Pool events that were dropped because they arrived faster than they were read.",
    ),
    "pool.backed_bytes": Number(
        "pool_backed_bytes", "Bytes of L1 that have memory behind them; only these are handed out."
    ),
    "pool.missing_bytes": Number(
        "pool_missing_bytes",
        "Bytes of L1 without memory because its file system (often /dev/shm) is full; should be 0.",
    ),
    "pool.prefaulted_bytes": Number("pool_prefaulted_bytes", "Bytes of L1 whose pages have been faulted in."),
    "pool.prefault_error": Number(
        "pool_prefault_error", "The errno that ended prefaulting early; 0 if none did."
    ),
    "recuts.geometries": Number(
        "recut_geometries",
        "Geometries of engines (parallel sizes, block size, order of axes) that are known.",
    ),
    "recuts.plans": Number(
        "recut_plans", "Pairs of geometries of which one can be made of the other's records."
    ),
    "recuts.impossible": Number("recut_impossible_plans", "Pairs of geometries of which none can be made."),
    "recuts.chunks": Number("recut_chunks_total", "Chunks made for lookups of records of another geometry."),
    "recuts.bytes": Number("recut_bytes_total", "Bytes of these chunks."),
    "recuts.ended.WORD": Number(
        "recuts_ended_total",
        "Lookups for which fewer chunks were made than were missing, by what was in the way.",
        label="reason",
    ),
    "sessions.attached": Number("sessions_attached", "Attached processes."),
    "sessions.detached": Number(
        "sessions_detached", "Processes that are alive but whose attach connection is closed."
    ),
    "sessions.groups": Number("sessions_groups", "Engines with at least one attached process."),
    "sessions.leases": Number("sessions_leases", "Leases held by sessions."),
    "sessions.leases_revoked": Number(
        "sessions_leases_revoked", "Revoked leases that have been neither returned nor handed on yet."
    ),
    "sessions.extents_being_written": Number(
        "sessions_extents_being_written", "Extents that are reserved and not committed."
    ),
    "sessions.tasks": Number("sessions_tasks", "Tasks running in the server."),
    "sessions.absent_keys_remembered": Number(
        "sessions_absent_keys_remembered", "Absent keys whose reason is remembered for `explain`."
    ),
    "l2_store.backlog_bytes": Number(
        "l2_store_backlog_bytes", "Bytes of L1 that stay pinned because they are waiting to be put."
    ),
    "l2_store.backlog_limit_bytes": Number(
        "l2_store_backlog_limit_bytes", "Limit of the bytes waiting to be put; chunks beyond it are skipped."
    ),
    "l2_store.adapters.ADAPTER.queued": Number("l2_store_queued_puts", "Puts waiting for this adapter."),
    "l2_store.adapters.ADAPTER.retrying": Number(
        "l2_store_retrying_puts", "Puts that this adapter throttled and that will be tried again."
    ),
    "l2_store.adapters.ADAPTER.in_flight": Number("l2_store_in_flight_puts", "Puts in progress."),
    "l2_store.adapters.ADAPTER.stored_bytes": Number("l2_store_stored_bytes_total", "Record bytes stored."),
    "l2_store.adapters.ADAPTER.outcomes.WORD": Number(
        "l2_store_outcomes_total",
        "Puts by outcome: stored, exists, throttled, taken_up (begun late), or `skipped:` and the reason.",
        "outcome",
    ),
    "l2_prefetch.fetches_running": Number(
        "l2_prefetch_fetches_running", "Lookups and prewarms that are loading now."
    ),
    "l2_prefetch.keys_loading": Number("l2_prefetch_keys_loading", "Records being loaded."),
    "l2_prefetch.loaded_bytes": Number("l2_prefetch_loaded_bytes_total", "Record bytes loaded."),
    "l2_prefetch.counts.WORD": Number(
        "l2_prefetch_outcomes_total",
        "Fetches, joined (waited for the load of another fetch), loaded, and failures as `reserve:` "
        "or `load:` and the reason.",
        "outcome",
    ),
    "l2_prefetch.adapters.ADAPTER.loading_bytes": Number(
        "l2_prefetch_loading_bytes", "Bytes being loaded from this adapter."
    ),
    "l2_prefetch.adapters.ADAPTER.waiting": Number(
        "l2_prefetch_waiting_fetches", "Fetches that wait for their turn on this adapter."
    ),
    "l2_adapters.ADAPTER.takes_loads": Number("l2_takes_loads", "1 if lookups ask this adapter, else 0."),
    "l2_adapters.ADAPTER.medium_well": Number(
        "l2_medium_well",
        "1 while the tier's storage was reached and its directory, if any, can be written to, else 0.",
    ),
    "l2_adapters.ADAPTER.stuck_bytes": Number(
        "l2_stuck_bytes", "Bytes of operations that are past their deadline and have not ended."
    ),
    "l2_adapters.ADAPTER.codec.staging_used_bytes": Number(
        "l2_codec_staging_used_bytes", "Staging memory that the adapter's codecs use now."
    ),
    "l2_adapters.ADAPTER.codec.encoded_from_bytes": Number(
        "l2_codec_input_bytes_total",
        "Bytes of the records that the adapter's codecs encoded, before encoding.",
    ),
    "l2_adapters.ADAPTER.codec.encoded_to_bytes": Number(
        "l2_codec_output_bytes_total", "Bytes of these records after encoding."
    ),
    "l2_adapters.ADAPTER.codec.WORD": Number(
        "l2_codec_records_total",
        "Records by what the adapter's codecs did with them, or why they could not: encoded, decoded,"
        " incompressible and so on.",
        "outcome",
    ),
    "l2_adapters.ADAPTER.numbers.segments_bytes": Number(
        "l2_segments_bytes", "Bytes of the segment files of a disk adapter."
    ),
    "l2_adapters.ADAPTER.numbers.read_only": Number(
        "l2_read_only",
        "1 after a write or sync of a disk adapter failed: it takes no puts until the server is started again;"
        " else 0.",
    ),
    "l2_adapters.ADAPTER.numbers.owners": Number(
        "l2_peer_owners", "Peers that this instance remembers as owners of chunks."
    ),
    "l2_adapters.ADAPTER.numbers.owners_skipped": Number(
        "l2_peer_owners_skipped", "Those of them that are not asked now because they failed."
    ),
    "l2_adapters.ADAPTER.numbers.WORD_bytes": Number(
        "l2_adapter_bytes_total",
        "Bytes that the adapter itself counts; see local-tiers.md, remote-tiers.md and p2p.md.",
        "event",
    ),
    "l2_adapters.ADAPTER.numbers.WORD": Number(
        "l2_adapter_events_total",
        "Events that the adapter itself counts; see local-tiers.md, remote-tiers.md and p2p.md.",
        "event",
    ),
    "l2_adapters.ADAPTER.host.pid": Number(
        "l2_host_pid", "Process id of the adapter host; 0 while none runs or if the adapter has none."
    ),
    "l2_adapters.ADAPTER.host.restarts": Number(
        "l2_host_restarts_total", "Adapter hosts that were started in place of one that had ended."
    ),
    "l2_adapters.ADAPTER.host.requests": Number(
        "l2_host_requests", "Requests to the adapter host that have not ended."
    ),
    "http.connections": Number("http_connections", "Open connections of the admin port."),
    "http.requests": Number("http_requests", "Requests in progress on the admin port, not counting probes."),
    "http.refused": Number(
        "http_refused_requests_total", "Requests answered with 503 because too many were in progress."
    ),
    "http.closed_WORD": Number(
        "http_closed_connections_total",
        "Connections closed by the admin port: idle (to make room for new ones, the longest idle "
        "first), late (a request took too long to arrive), stalled (the client did not read the "
        "response), stranger (a process of another user opened it).",
        "reason",
    ),
    "process.restarts": Number(
        "process_restarts_total",
        "Times that the supervising process has restarted the server because it died.",
    ),
    "log.dropped_lines": Number(
        "log_dropped_lines_total",
        "Log lines dropped, because the reader of the log had stopped reading or was gone.",
    ),
    "attach.pending": Number("attach_pending", "Handshakes in progress."),
    "attach.attached": Number("attach_attached", "Sessions with an open attach connection."),
    "attach.detached": Number(
        "attach_detached", "Sessions without an open attach connection whose process is alive."
    ),
    "attach.old_rows": Number(
        "attach_old_rows", "Rows of the previous server whose process has neither ended nor re-attached."
    ),
    "attach.stranded": Number(
        "attach_stranded",
        "Sessions that ended while no server was watching and whose device may still write into L1.",
    ),
    "attach.stranded_bytes": Number(
        "attach_stranded_bytes",
        "Bytes of L1 kept in quarantine for stranded sessions until an admin clears them.",
    ),
    "attach.refused.WORD": Number(
        "attach_refused_total",
        "Attaches refused, by code; `gave_up`: the process ended or hung up first.",
        "code",
    ),
    "cluster.member": Number(
        "cluster_member", "1 if the controller has accepted this instance and has answered since, else 0."
    ),
    "cluster.frozen": Number("cluster_frozen", "1 while stores are refused during a full sync, else 0."),
    "cluster.last_event": Number(
        "cluster_last_event", "Sequence number of the last batch of events sent to the controller."
    ),
    "cluster.queued_tags": Number(
        "cluster_queued_tags", "Chunks with a change that the controller has not been told yet."
    ),
    "cluster.commands_waiting": Number(
        "cluster_commands_waiting",
        "Commands of the controller that are running or whose result it does not have yet.",
    ),
    "cluster.registrations": Number("cluster_registrations_total", "Registrations with a controller."),
    "cluster.heartbeats": Number("cluster_heartbeats_total", "Heartbeats answered."),
    "cluster.unanswered": Number("cluster_unanswered_heartbeats_total", "Heartbeats not answered."),
    "cluster.event_batches": Number("cluster_event_batches_total", "Batches of events sent."),
    "cluster.events": Number("cluster_events_total", "Changes of chunks sent in batches of events."),
    "cluster.syncs": Number("cluster_syncs_total", "Full syncs that succeeded."),
    "cluster.syncs_failed": Number("cluster_failed_syncs_total", "Full syncs that failed."),
    "cluster.freezes": Number("cluster_freezes_total", "Full syncs during which stores were refused."),
    "cluster.freezes_cut": Number(
        "cluster_cut_freezes_total", "Freezes ended early because heartbeats were no longer answered."
    ),
    "cluster.overflows": Number(
        "cluster_overflows_total", "How often more changes piled up than could be kept for the controller."
    ),
    "peers_served.leases": Number(
        "peers_served_leases", "Leases that readers hold on chunks of this instance."
    ),
    "peers_served.pins": Number(
        "peers_served_pins", "Pins that the controller holds on chunks of this instance."
    ),
    "peers_served.leased_bytes": Number(
        "peers_served_leased_bytes",
        "Bytes of L1 kept by readers' leases and the controller's pins, each record once.",
    ),
    "peers_served.limit_bytes": Number(
        "peers_served_limit_bytes",
        "Most bytes of L1 that readers' leases and the controller's pins may keep.",
    ),
    "peers_served.draining": Number("peers_served_draining", "1 while peers are granted no leases, else 0."),
    "peers_served.read_bytes": Number(
        "peers_served_read_bytes_total", "Bytes that readers have reported as read from here."
    ),
    "peers_served.granted": Number("peers_served_granted_leases_total", "Leases granted."),
    "peers_served.released": Number("peers_served_released_leases_total", "Leases ended by their reader."),
    "peers_served.expired": Number("peers_served_expired_leases_total", "Leases that expired."),
    "peers_served.absent": Number(
        "peers_served_absent_requests_total", "Lease requests for records that are not here."
    ),
    "peers_served.limit": Number(
        "peers_served_limited_requests_total", "Lease requests shortened by the limit."
    ),
    "peers_served.draining_refused": Number(
        "peers_served_draining_refused_requests_total", "Lease requests refused while draining."
    ),
    "peers_served.errors": Number("peers_served_refused_requests_total", "Requests of peers refused."),
    "peers_served.received": Number("peers_served_received_frames_total", "Frames received from peers."),
    "peers_served.dropped_replies": Number(
        "peers_served_dropped_replies_total",
        "Replies to peers dropped because the receiver was gone or left too much unread.",
    ),
    "peers_served.unread_reply_bytes": Number(
        "peers_served_unread_reply_bytes", "Bytes of large replies that peers have not read yet."
    ),
    "peers_served.refused_handshakes": Number(
        "peers_served_refused_handshakes_total",
        "Connections from peers that ended before they had proved the right keys.",
    ),
    "peers_served.connections": Number("peers_served_connections", "Open connections from peers."),
    "peers_served.cut_connections": Number(
        "peers_served_cut_connections_total",
        "Connections from peers cut: over the limit, or with more unprocessed bytes than allowed.",
    ),
    "tails.stored": Number("tails_stored_total", "Tails that engines have stored in L1."),
    "tails.replaced": Number(
        "tails_replaced_total", "Tails dropped because a chunk or a longer tail holds their tokens."
    ),
    "tails.replaced_in_l2": Number(
        "tails_replaced_in_l2_total", "Of these, tails that were deleted from L2."
    ),
    "tails.put": Number(
        "tails_put_total", "Tails offered to L2 because nothing had replaced them for a while."
    ),
    "tails.waiting": Number("tails_waiting", "Tails that wait to be offered to L2."),
    "tails.lingering": Number("tails_lingering", "Replaced tails that are still in use."),
    "rpc.received": Number("rpc_received_frames_total", "Messages received."),
    "rpc.unread_reply_bytes": Number(
        "rpc_unread_reply_bytes", "Bytes of replies that the clients' sockets have no room for."
    ),
    "rpc.connections": Number("rpc_connections", "Open connections."),
    "rpc.cut_connections": Number(
        "rpc_cut_connections_total",
        "Connections closed: one too many, with too many unread bytes, invalid ZMTP, or no requests.",
    ),
}
"""By path. ADAPTER stands for the name of an adapter (`fs-0`) and becomes the label `adapter`; WORD stands for one of
several words. Where two paths match, the first one counts."""
