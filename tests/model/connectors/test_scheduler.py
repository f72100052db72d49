"""vLLM's calls to the scheduler side in any order that vLLM may make them, with errors planted: no lease is lost."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.types import canonical_json
from tests.harness.amount import amount
from tests.harness.scheduler_side import BLOCK, Clock, FakeClient, GuardedSide, make_request, make_side, step


class Scheduling(RuleBasedStateMachine):
    """A scheduler side under vLLM's calls: no lease is lost, and no block is freed while a store reads it.

    Each reset begins a generation of KV; a store under an identity rests on KV of the identity's generation alone.
    """

    @initialize(
        hits=st.sampled_from([0, 2, 6]),
        answers=st.booleans(),
        world_size=st.sampled_from([1, 2]),
        mode=st.sampled_from(["sync", "async"]),
        faults=st.sampled_from([False, False, True]),
    )
    def begin(self, hits, answers, world_size, mode, faults):
        self.faults = faults  # after most of them the side is off, and nothing happens any more
        self.clock = Clock()
        self.client = FakeClient(hits=hits, answers=answers)
        side = make_side(self.client, self.clock, world_size=world_size, settings={"load_mode": mode})
        self.side = GuardedSide(side)
        self.world_size = world_size
        self.waiting, self.running, self.loading = [], {}, []
        self.reading, self.kept = {}, set()
        self.generation, self.generations = 0, {"": 0}
        self.in_engine = 0  # the oldest generation that may be in vLLM's own cache
        self.rests_on, self.preempted_by_reset = {}, set()
        self.unreported = []

    @rule(tokens=st.integers(1, 60))
    def arrive(self, tokens):
        request = make_request(tokens)
        self.side.on_new_request(request)
        self.waiting.append(request)

    @precondition(lambda self: self.faults)
    @rule(method=st.sampled_from(["lookup", "cancel", "identity", "peek", "release"]))
    def fail_once(self, method):
        """The client's next call of this method raises."""
        self.client.fails = method

    @rule(n=st.integers(0, 6))
    def answer(self, n):
        for call in self.client.calls:
            if not call.done and not call.cancelled:
                call.answer(n)
                return

    @rule(tokens=st.integers(9, 60))
    def arrive_and_run(self, tokens):
        self.arrive(tokens)
        self.waiting.insert(0, self.waiting.pop())
        self.schedule(0, True)

    @rule()
    def server_asks_for_everything(self):
        """Leases of waiting requests go back; leases that workers may copy under never do (`FakeClient.release`)."""
        for call in self.client.calls:
            if self.client.revoke(call):
                assert call.result.lease not in self.client.handed_on

    @precondition(lambda self: self.waiting)
    @rule(computed=st.integers(0, 6), fits=st.booleans(), asked_back=st.booleans())
    def schedule(self, computed, fits, asked_back=False):
        request = self.waiting[0]
        computed = min(computed * BLOCK, (request.num_tokens - 1) // BLOCK * BLOCK)
        tokens, asynchronous = self.side.matched_tokens(request, computed)
        if tokens is None:
            return
        assert 0 <= tokens <= request.num_tokens - 1 - computed
        if asked_back:
            self.server_asks_for_everything()
        if not fits:
            # vLLM has no free blocks: the request stays in the queue, and the step goes on without it.
            self.plan([])
            return
        self.waiting.pop(0)
        self.side.allocated(request, [list(range(1, 40))], tokens)
        self.rests_on[request.request_id] = self.in_engine if computed else self.generation
        if asynchronous and tokens:
            self.plan([])
            self.loading.append((request, computed + tokens))
        else:
            count = request.num_tokens - computed - tokens
            self.plan([(request, computed + tokens, count)])
            self.running[request.request_id] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "preempt", "go on"]))
    def continue_or_end(self, data, how):
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if how == "go on":
            request.all_token_ids.append(1)
            self.plan([(request, request.num_tokens - 1, 1)])
            return
        del self.running[request.request_id]
        if how == "preempt":
            for store, owner in list(self.reading.items()):
                if owner == request.request_id:
                    del self.reading[store]
            self.plan([], preempted=[request.request_id])
            self.waiting.insert(0, request)
        else:
            self.end(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def abort_waiting(self):
        self.end(self.waiting.pop())

    @precondition(lambda self: self.loading)
    @rule(failed=st.booleans(), aborted=st.booleans())
    def load_ends(self, failed, aborted):
        request, computed = self.loading.pop(0)
        if aborted:
            assert self.side.finished(request, [list(range(1, 40))]) is False
        self.side.heard([], [request.request_id], range(1, 40) if failed and not aborted else ())
        if failed and not aborted:
            self.waiting.insert(0, request)
        elif not aborted:
            self.side.allocated(request, [list(range(1, 40))], 0)
            self.plan([(request, computed, request.num_tokens - computed)])
            self.running[request.request_id] = request

    @rule(preempt=st.booleans())
    def weights_change(self, preempt):
        """vLLM's `reset_prefix_cache`, with or without `reset_running_requests`."""
        if preempt:
            self.preempted_by_reset |= self.running.keys()
            self.reading = {
                store: owner for store, owner in self.reading.items() if owner not in self.running
            }
            self.waiting[:0] = self.running.values()
            self.running.clear()
        empty = not (self.running or self.loading or self.reading or self.kept)
        if preempt and not empty:
            return  # vLLM gives up before it calls the connector
        self.side.reset(engine_empty=empty)
        self.generation += 1
        mark = self.side.first._weights.mark
        self.generations[canonical_json(["weights", mark, ""]).decode() if mark else ""] = self.generation
        if empty:
            self.in_engine = self.generation

    @rule(most=st.sampled_from([1, 2]))
    def workers_report(self, most):
        """So many workers at most report what they have gathered; the others do so later."""
        for plan, silent in self.unreported:
            workers = min(most, silent)
            stores = [store.store_id for store in plan.stores]
            reports = [
                WorkerReport(plan.step, gathered=list(stores), stored=[(s, 1) for s in stores])
                for _ in range(workers)
            ]
            self.side.heard(reports, [], [])
            for store in stores if workers == silent else ():
                self.reading.pop(store, None)
        self.unreported = [(plan, silent - most) for plan, silent in self.unreported if silent > most]

    @rule(seconds=st.sampled_from([0.01, 0.2, 4.0]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    def plan(self, scheduled, preempted=()):
        plan = step(self.side, scheduled, self.preempted_by_reset.union(preempted))
        self.preempted_by_reset.clear()
        for store in plan.stores:
            self.reading[store.store_id] = store.request_id
            assert self.rests_on[store.request_id] == self.generations[store.identity.adapter]
        self.kept -= plan.awaited
        self.unreported.append((plan, self.world_size))
        if not self.side.is_off:
            assert not (plan.awaited & {s.request_id for s in self.side.stores.of_finished})
        elif not self.client.fails:
            self.side.take_events()
            assert self.client.leases == [] and not plan.stores

    def end(self, request):
        kept = self.side.finished(request, [list(range(1, 40))])
        if kept:
            self.kept.add(request.request_id)
        if request.request_id in self.reading.values():
            assert kept, "blocks were freed while a store reads them"

    @invariant()
    def leases_have_an_owner(self):
        if not hasattr(self, "side") or self.side.is_off:
            return
        tracked = list(self.side._lookups.tracked.values())
        held = [t.hit.lease for t in tracked if t.hit is not None and not t.call.revoked]
        pending = [
            call.result.lease
            for call in self.client.calls
            if call.done and not call.cancelled and call.result.lease is not None
        ]
        asked = [t.call for t in tracked if t.call is not None and t.hit is None and not t.call.revoked]
        answered = [c.result.lease for c in asked if c.done and c.result.lease is not None]
        assert sorted(self.client.leases) == sorted(held + answered)
        assert set(self.client.leases) <= set(pending)

    def teardown(self):
        if hasattr(self, "side"):
            self.client.fails = ""
            self.side.close()
            assert self.client.leases == [] and self.client.closed


TestScheduling = Scheduling.TestCase
TestScheduling.settings = hypothesis_settings(
    max_examples=amount(60, 100), stateful_step_count=50, deadline=None
)
