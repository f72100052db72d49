"""The connector's scheduler side for tests: a client that keeps account of its leases, and vLLM's calls to the side.

Tests advance time through `Clock`; nothing here waits, and no server or engine runs.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from kvstrata.client.handles import LookupCall, LookupResult
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.groups import whole_group
from kvstrata.connectors.vllm.scheduler import SchedulerSide
from kvstrata.connectors.vllm.weights import WeightsVersion
from kvstrata.keys import ChunkHasher
from kvstrata.types import EXTENT, LayoutIdentity, LeaseName, MissReason, identity_root

BLOCK, CHUNK = 4, 8
LAYOUT = LayoutIdentity(model="m", kv_dtype="bfloat16", chunk_tokens=CHUNK)
SLICES = (b"\1" * 32, b"\2" * 32)


class FakeCall(LookupCall):
    """A lookup that the test ends with `answer`."""

    def __init__(self, client, n_asked):
        super().__init__(lambda call: None)
        self.client, self.n_asked, self.cancelled = client, n_asked, False
        client.may_fail("lookup")

    def wait(self, timeout_s):
        assert timeout_s <= 0.002, "the scheduler's thread may not wait for so long"
        return super().wait(0)

    def cancel(self):
        self.client.may_fail("cancel")
        assert not self.cancelled
        self.cancelled = True
        if self.done and self.result.lease is not None and not self.revoked:
            self.client.leases.remove(self.result.lease)
        super().cancel()

    def answer(self, n, promised=0):
        n = min(n, self.n_asked)
        if not n:
            self.finish(LookupResult(0, None, b"", 0, MissReason.NEVER_STORED))
            return
        lease = LeaseName(b"s" * 16, next(self.client.seqs), 1)
        self.client.leases.append(lease)
        slices = len(self.client.slices)
        extents = b"".join(EXTENT.pack(i, 1, i, 1, 0) for i in range(n * slices))
        self.finish(LookupResult(n, lease, extents, slices, "", promised=max(n, promised)))


def chunks_of(chain):
    """How many chunks a hasher or a chain of keys has."""
    return chain.n_chunks if isinstance(chain, ChunkHasher) else len(chain) // 32


class FakeClient:
    """A client that keeps account of its leases.

    `forbidden`: tenants that the server refuses.  `hits`: chunks that lookups find; `whole`: chunks that L1 has in the
    slices that are needed in every chunk.  `ahead`: tokens behind a chunk that its key covers.
    `hints`: what was said at requests' ends.  `promised`: chunks of each promise that stands.
    `missed_chunks`: request and number of chunks of each miss that was told without a lookup.
    `leases`: held by the scheduler; `handed_on`: given to the workers; `revoked`: taken back by the server.
    """

    def __init__(self, hits=0, answers=True, *, connected=True, has_l2=False, slices=SLICES):
        self.connected, self.has_l2, self.chunk_tokens = connected, has_l2, CHUNK
        self.slices, self.layout = slices, LAYOUT
        self.pool = self
        self.hits, self.answers = hits, answers
        self.calls, self.leases, self.handed_on, self.seqs = [], [], [], itertools.count(1)
        self.closed, self.identities, self.revoked = False, [], set()
        self.fails = ""
        self.evicted = set()
        self.forbidden = set()
        self.ahead = 0
        self.whole = 0
        self.missed_chunks = []
        self.hints = []
        self.prompt_tokens_s = 0.0
        self.has_promises = False
        self.promised = {}

    def may_fail(self, method):
        """Raise once if `fails` names the method."""
        if self.fails == method:
            self.fails = ""
            raise RuntimeError(f"planted in {method}")

    def identity(self, request):
        self.may_fail("identity")
        self.identities.append(request)
        root = identity_root(self.layout, request)
        return SimpleNamespace(
            request=request,
            root=root,
            slices=self.slices,
            forbidden=request.tenant in self.forbidden,
            hasher=lambda media=(): ChunkHasher(root, self.chunk_tokens, media, lookahead_tokens=self.ahead),
        )

    def peek(self, identity, hasher):
        self.may_fail("peek")
        return min(self.hits, chunks_of(hasher))

    def missed(self, identity, chain, *, request_id, probe):
        self.missed_chunks.append((request_id, chunks_of(chain)))

    def hint(self, identity, last, next_):
        self.hints.append((last, next_))

    def sizes(self):
        return 0, 0

    def promise(self, identity, chain):
        number = next(self.seqs)
        self.promised[number] = chunks_of(chain)
        return SimpleNamespace(withdraw=lambda: self.promised.pop(number, None))

    def peek_whole(self, identity, chain):
        return min(self.whole, chunks_of(chain))

    def present(self, chunks):
        return [key not in self.evicted for _, key in chunks]

    def lookup(
        self, identity, hasher, *, tails=(), traceparent="", own_chunks=0, stores_late=False, wait_ms=0,
        expects=False, source="", in_parts=False, follows=0, **_,
    ):  # fmt: skip
        call = FakeCall(self, chunks_of(hasher))
        call.tails, call.traceparent = tails, traceparent
        call.own_chunks, call.stores_late = own_chunks, stores_late
        call.wait_ms, call.expects, call.source = wait_ms, expects, source
        call.in_parts, call.follows = in_parts, follows
        self.calls.append(call)
        if self.answers:
            call.answer(self.hits)
        return call

    def release(self, leases, *, group=False):
        self.may_fail("release")
        for lease in leases:
            if lease in self.revoked:
                assert group, "a lease was handed to the workers after the server had revoked it"
                continue
            self.leases.remove(lease)
            if not group:
                self.handed_on.append(lease)

    def revoke(self, call):
        """Revoke the lease of a lookup, as the server would; return whether the lease was given back."""

        def spend(lease):
            if lease not in self.leases:
                return False
            self.leases.remove(lease)
            self.revoked.add(lease)
            return True

        return call.take_back(spend)

    def close(self, timeout_s):
        self.closed = True


_ids = itertools.count(1)


class FakeRequest(SimpleNamespace):
    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def update_block_hashes(self):
        """As vLLM: hash the blocks that have no hash yet, the first one with the salt."""
        for block in range(len(self.block_hashes), self.num_tokens // BLOCK):
            before = self.block_hashes[-1] if block else self.cache_salt
            self.block_hashes.append((before, *self.all_token_ids[block * BLOCK : (block + 1) * BLOCK]))


def make_request(n_tokens, **changes):
    fields = {
        "request_id": f"r{next(_ids)}",
        "all_token_ids": list(range(n_tokens)),
        "num_prompt_tokens": n_tokens,
        "num_computed_tokens": n_tokens,
        "prompt_embeds": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "kv_transfer_params": None,
        "block_hashes": [],
    }
    request = FakeRequest(**(fields | changes))
    request.update_block_hashes()
    return request


def arrive(side, n_tokens, **changes):
    request = make_request(n_tokens, **changes)
    side.on_new_request(request)
    return request


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class GuardedSide:
    """A scheduler side as the connector calls it, with errors of ours as the connector answers them."""

    def __init__(self, side):
        self.side = self.first = side

    @property
    def is_off(self):
        return self.side is not self.first

    def __getattr__(self, name):
        method = getattr(self.side, name)
        if name not in (
            "on_new_request",
            "matched_tokens",
            "allocated",
            "plan_step",
            "heard",
            "finished",
            "reset",
        ):
            return method

        def call(*arguments, **options):
            try:
                return getattr(self.side, name)(*arguments, **options)
            except Exception:
                if name in ("on_new_request", "matched_tokens"):
                    self.first.give_up(arguments[0])
                    return 0, False
                if not self.is_off:
                    self.side = self.first.turn_off()
                return getattr(self.side, name)(*arguments, **options)

        return call


def weights_without_digests():
    """Make a WeightsVersion whose workers cannot tell their weights, so each reset begins an identity of its own."""
    weights = WeightsVersion(1)
    weights.known, weights.can_tell = True, False
    return weights


def make_side(client=None, clock=None, world_size=1, **changes):
    options = {"chunk_size": CHUNK, "save_unfull_chunk": False} | changes.pop("settings", {})
    changes.setdefault("weights", weights_without_digests())
    return SchedulerSide(
        Engine(
            client or FakeClient(),
            ClientSettings(**options),
            changes.pop("groups", [whole_group(BLOCK, CHUNK)]),
            100,
            world_size,
            now=clock or Clock(),
            **changes,
        )
    )


def step(side, scheduled=(), preempted=(), tables=None, states=None):
    """Make one scheduling step; return its plan.

    `scheduled`: (request, tokens computed before, tokens scheduled); `tables`: by request id, the table of the only
    group, or a tuple with that of each group; `states`: by request id, (group, block, tokens) of states that vLLM
    offers.
    """
    scheduled = list(scheduled)
    tables = tables or {}

    def tables_of(request_id):
        found = tables.get(request_id) or list(range(1, 100))
        return found if isinstance(found, tuple) else (found,)

    output = SimpleNamespace(
        num_scheduled_tokens={r.request_id: n for r, _, n in scheduled},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r, _, _ in scheduled], num_computed_tokens=[c for _, c, _ in scheduled]
        ),
        finished_req_ids=set(),
        preempted_req_ids=set(preempted),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=tables_of, boundary_state_offloads=states or {}
        ),
    )
    return side.plan_step(output)


def ask(side, request, computed=0):
    """Ask about a waiting request as vLLM does; return (tokens promised, None: ask again; whether asynchronous)."""
    tokens, asynchronous = side.matched_tokens(request, computed)
    return tokens, asynchronous


def scene(n_tokens, hits=0, **changes):
    """(A client whose lookups find so many chunks, its scheduler's side, a new request of so many tokens)"""
    client = changes.pop("client", None) or FakeClient(hits)
    side = make_side(client, **changes)
    return client, side, arrive(side, n_tokens)


def hit_of(side, n_tokens, **changes):
    """(A new request, the tokens that vLLM is promised for it)"""
    request = arrive(side, n_tokens, **changes)
    return request, ask(side, request)[0]


def planned_loads(side, request, tokens, table):
    side.allocated(request, table, tokens)
    return step(side).loads


def media(identifier):
    return SimpleNamespace(mm_position=SimpleNamespace(offset=9, length=3), identifier=identifier)
