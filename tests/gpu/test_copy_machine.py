"""The copy engine of a device against a model that knows its promises: any order of jobs, cancels, pins and errors."""

from __future__ import annotations

import dataclasses
import mmap
import random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvstrata.native.core import CopyOutcome, RecordSpec, buffer_address, record_header
from kvstrata.native.cuda import CudaCopyEngine, CudaCopyPlan, HostRegion
from tests.harness.amount import amount
from tests.harness.cuda_driver import simulated
from tests.harness.gpu_kv import Device, PagedKv, Shape

pytestmark = pytest.mark.integration

SHAPE = Shape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=8, ffn=64)
BLOCK_TOKENS, BLOCKS, CHUNK_BLOCKS, SLOTS = 4, 16, 2, 4
WAIT_S = 30.0
Image = tuple[bytes, ...]
"""A block: its bytes in each layer."""


@dataclasses.dataclass
class Job:
    """One record on its way."""

    number: int
    load: bool
    slot: int
    blocks: list[int]
    key: bytes
    cancelled: bool = False
    disturbed: bool = False
    """An error was injected while it was under way."""


class Copies(RuleBasedStateMachine):
    """What the model says is in blocks and records is what is there, whenever nothing writes it."""

    way: ClassVar[str]
    device: ClassVar[Device]

    def __init__(self) -> None:
        super().__init__()
        self.base = self.device.allocate(PagedKv.memory_bytes(SHAPE, BLOCK_TOKENS, BLOCKS))
        self.kv = PagedKv(
            self.base,
            SHAPE,
            layout="LHBNC",
            block_tokens=BLOCK_TOKENS,
            num_blocks=BLOCKS,
            chunk_tokens=CHUNK_BLOCKS * BLOCK_TOKENS,
        )
        self.plan = CudaCopyPlan(self.kv.host_plan, 0)
        self.step_bytes = -(-self.plan.record_bytes(CHUNK_BLOCKS) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, SLOTS * self.step_bytes)
        self.host = buffer_address(self.memory)
        self.engine = CudaCopyEngine(0, engine=self.way)  # type: ignore[arg-type]
        self.region: HostRegion | None = None
        self.blocks: dict[int, Image] = {}
        self.records: dict[int, tuple[bytes, list[Image]]] = {}
        self.jobs: dict[int, Job] = {}
        self.failing = False
        self.numbers = iter(range(1, 1 << 30))
        for block in range(BLOCKS):
            self._write(block)
        for slot in range(SLOTS):
            self._store(slot, [2 * slot, 2 * slot + 1])
        self.finish()

    def _write(self, block: int) -> None:
        chance = random.Random(next(self.numbers))
        self.blocks[block] = tuple(chance.randbytes(self.kv.image_bytes) for _ in range(SHAPE.layers))
        for layer, image in enumerate(self.blocks[block]):
            for offset, at, length in self.kv.places(0, BLOCK_TOKENS):
                self.device.write(self.kv.address(layer, block) + offset, image[at : at + length])

    def _read(self, layer: int, block: int) -> bytes:
        address = self.kv.address(layer, block)
        places = self.kv.places(0, BLOCK_TOKENS)
        return b"".join(self.device.read(address + offset, length) for offset, _, length in places)

    def _payload(self, slot: int) -> bytes:
        header = record_header(self.host + slot * self.step_bytes, self.step_bytes)
        start = slot * self.step_bytes + header.header_bytes
        return self.memory[start : start + header.payload_bytes]

    def _draw_blocks(self, data: st.DataObject, count: int, *, writes: bool) -> list[int]:
        """Blocks that no job writes and, where they are to be written, none reads."""
        busy = {block for job in self.jobs.values() if writes or job.load for block in job.blocks}
        free = sorted(set(range(BLOCKS)) - busy)
        return data.draw(st.lists(st.sampled_from(free), min_size=count, max_size=count, unique=True))

    def _slots(self, *, writes: bool) -> list[int]:
        """Slots likewise."""
        busy = {job.slot for job in self.jobs.values() if writes or not job.load}
        return [slot for slot in range(SLOTS) if slot not in busy and (writes or slot in self.records)]

    @property
    def _is_room(self) -> bool:
        return len(self.jobs) < 4

    def _store(self, slot: int, blocks: list[int]) -> None:
        number = next(self.numbers)
        key = number.to_bytes(32, "little")
        self.records.pop(slot, None)
        moment = self.plan.behind(self.engine.moment(self.device.computes))
        spec = RecordSpec(key, bytes(32), bytes(32), b"", CHUNK_BLOCKS * BLOCK_TOKENS, 1)
        self._submit(Job(number, False, slot, blocks, key), moment, spec)

    def _submit(self, job: Job, plan: CudaCopyPlan, spec: Any) -> None:
        item = (job.blocks, self.host + job.slot * self.step_bytes, self.step_bytes, spec)
        kind = "scatter" if job.load else "gather"
        assert self.engine.submit(job.number, kind, plan, [item])  # type: ignore[arg-type]
        job.disturbed = self.failing
        self.jobs[job.number] = job

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        [block] = self._draw_blocks(data, 1, writes=True)
        self._write(block)

    @precondition(lambda self: self._is_room and self._slots(writes=True))
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self._slots(writes=True)))
        self._store(slot, self._draw_blocks(data, CHUNK_BLOCKS, writes=False))

    @precondition(lambda self: self._is_room and self._slots(writes=False))
    @rule(data=st.data(), stale=st.booleans())
    def load(self, data: st.DataObject, stale: bool) -> None:
        slot = data.draw(st.sampled_from(self._slots(writes=False)))
        blocks = self._draw_blocks(data, CHUNK_BLOCKS, writes=True)
        key = bytes(32) if stale else self.records[slot][0]
        self._submit(Job(next(self.numbers), True, slot, blocks, key), self.plan, (key, bytes(32)))

    @precondition(lambda self: self._is_room and self._slots(writes=False))
    @rule(data=st.data())
    def load_and_compute_layer_after_layer(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self._slots(writes=False)))
        blocks = self._draw_blocks(data, CHUNK_BLOCKS, writes=True)
        key, images = self.records[slot]
        job = Job(next(self.numbers), True, slot, blocks, key)
        self._submit(job, self.plan.layerwise(), (key, bytes(32)))
        for layer in range(SHAPE.layers):
            ordered = self.engine.await_section(job.number, layer, self.device.computes, WAIT_S)
            assert ordered or job.disturbed
            self.device.finish()
            for block, image in zip(blocks, images, strict=True) if not job.disturbed else ():
                assert self._read(layer, block) == image[layer], "a layer was computed before its load"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        self.engine.cancel(job.number)
        job.cancelled = True

    @rule()
    def pin_or_unpin(self) -> None:
        if self.region is None:
            self.region = HostRegion(0, self.host, SLOTS * self.step_bytes)
            self.engine.pin(self.region)
        else:
            self.finish()
            self._unpin()

    def _unpin(self) -> None:
        assert self.region is not None
        self.engine.unpin(self.region)
        self.region.unregister()
        self.region = None

    @rule(
        call=st.sampled_from(
            ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemcpyBatchAsync", "cuLaunchKernel"]
        )
    )
    def the_driver_refuses_a_call(self, call: str) -> None:
        self.device.set("fail", f"{call}:2:1")
        self.failing = True
        for job in self.jobs.values():
            job.disturbed = True

    @rule()
    def finish(self) -> None:
        """All jobs end; what they say of themselves is so."""
        for number in self.jobs:
            assert self.engine.wait(number, WAIT_S), "a job never ended"
        ended = dict(self.engine.completions())
        assert ended.keys() == self.jobs.keys()
        for number, [outcome] in ended.items():
            self._check(self.jobs[number], CopyOutcome(outcome))
        self.jobs.clear()
        self.device.set("fail", "")
        self.failing = False

    def _check(self, job: Job, outcome: CopyOutcome) -> None:
        allowed = {CopyOutcome.OK}
        if job.load and self.records[job.slot][0] != job.key:
            allowed = {CopyOutcome.STALE}
        allowed |= {CopyOutcome.CANCELLED} if job.cancelled else set()
        allowed |= {CopyOutcome.FAILED} if job.disturbed else set()
        assert outcome in allowed, f"{outcome!r} of {job}"
        if not job.load:
            if outcome is CopyOutcome.OK:
                images = [self.blocks[block] for block in job.blocks]
                wanted = b"".join(image[layer] for layer in range(SHAPE.layers) for image in images)
                assert self._payload(job.slot) == wanted, "a record is wrong"
                # Whether a cancelled or disturbed store ends well depends on time, and the next draws must not.
                if not (job.cancelled or job.disturbed):
                    self.records[job.slot] = (job.key, images)
            return
        if outcome is CopyOutcome.FAILED:
            for block in job.blocks:
                self._write(block)
            return
        if outcome is CopyOutcome.OK:
            self.blocks.update(zip(job.blocks, self.records[job.slot][1], strict=True))
        for block in job.blocks:
            for layer, image in enumerate(self.blocks[block]):
                assert self._read(layer, block) == image, f"block {block} is wrong after {outcome!r}"

    def teardown(self) -> None:
        """An engine may be closed at any time: everything it had begun has ended then."""
        if len(self.jobs) % 2:
            self.finish()
        self.device.set("fail", "")
        self.engine.close()
        for slot in range(SLOTS):
            if slot in self.records and slot not in {job.slot for job in self.jobs.values() if not job.load}:
                wanted = b"".join(
                    image[layer] for layer in range(SHAPE.layers) for image in self.records[slot][1]
                )
                assert self._payload(slot) == wanted, "a record that nobody stored into has changed"
        if self.region is not None:
            self.region.unregister()
        self.device.free(self.base)
        self.memory.close()


@simulated(delay_us=300)
def test_jobs_cancels_pins_and_errors_in_any_order_keep_every_promise() -> None:
    Copies.device = Device()
    for Copies.way in ("dma", "kernel"):
        run_state_machine_as_test(
            Copies,
            settings=settings(
                max_examples=amount(10, 40),
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
