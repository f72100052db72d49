"""Re-announces the blocks in vLLM's prefix cache in rounds, so that a late subscriber gets the full list.

vLLM announces a block once, and replays only its last batches (`buffer_steps`).  So the blocks that finished requests
have left in the cache are announced again in rounds of half as many steps: a replay then contains a whole round.

1. A block is announced only while vLLM's pool has it, and after the pool's own events of the step.
2. A round announces a block after its parent, so a subscriber that receives a whole round needs no earlier event.
3. No step examines or announces more than STEP_BLOCKS blocks of finished requests.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

STEP_BLOCKS = 512
"""Maximum number of blocks examined or announced in a step, about a millisecond of the scheduler's time."""
MAX_FINISHED = 1_000
"""Maximum number of finished requests that wait to be examined; beyond it the oldest is dropped."""

Adapter = tuple[int, str] | None
"""The number and name of a request's adapter."""


class AnnouncedBlocks(NamedTuple):
    """Consecutive blocks of one chain that are announced together."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    extra_keys: list[Any]
    """Each block's extra keys, which decide its KV besides its tokens, as in vLLM's own events."""
    adapter: Adapter


class EngineView(NamedTuple):
    """The functions by which this module reads the engine."""

    hashes_of: Callable[[Any], Sequence[bytes]]
    """The hashes of a request's full blocks."""
    is_cached: Callable[[bytes], bool]
    """Whether vLLM's pool has a block of this hash."""
    extra_keys: Callable[[Any, int, int], list[Any]]
    """(request, first token, number of blocks) → extra keys of these blocks, as in AnnouncedBlocks."""
    event: Callable[[AnnouncedBlocks], Any]
    """Makes the event that announces these blocks."""
    n_blocks: int
    """Number of blocks of vLLM's pool."""


class _Block(msgspec.Struct, gc=False):
    """A block that was in the pool when last checked. Untracked by the garbage collector, to keep its walks short."""

    name: bytes
    parent: bytes | None
    tokens: array[int]
    extra: Any
    adapter: Adapter
    number: int
    """Its position in the order of announcements."""
    round: int
    """The round in which it was added."""


class OwnCache:
    """Re-announces blocks in rounds. Belongs to the scheduler's thread. A block takes about 400 bytes."""

    def __init__(self, engine: EngineView, *, block_tokens: int, kept_batches: int) -> None:
        """`kept_batches`: number of batches that vLLM replays."""
        self._engine = engine
        self._block_tokens = block_tokens
        self._round_steps = max(1, kept_batches // 2)
        self._step = 0
        self._round = 0
        self._round_end = self._round_steps
        """The step in which the next round begins."""
        self._finished: deque[Any] = deque(maxlen=MAX_FINISHED)
        self._looked = 0
        """Number of the first finished request's blocks that were examined."""
        self._fresh = False
        """Whether one of them was unknown: vLLM has then stored the later ones again."""
        self._blocks: dict[bytes, _Block] = {}
        self._waiting: deque[_Block] = deque()
        """Blocks not yet announced in this round, by number; void if `_blocks` does not have them."""
        self._announced: deque[_Block] = deque()
        """Blocks already announced in this round, by number."""
        self._next_number = 0

    def __len__(self) -> int:
        """Number of remembered blocks."""
        return len(self._blocks)

    def finished(self, request: Any) -> None:
        """A request has ended: announce the blocks that it has left in the cache from the next round on."""
        if len(self._finished) == MAX_FINISHED:
            self._looked, self._fresh = 0, False
        self._finished.append(request)

    def take_events(self) -> list[Any]:
        """The announcements of this step. Called once per step, after vLLM has taken the pool's events of the step."""
        self._step += 1
        # Most of that many blocks have left the cache; checking each at its turn removes them.
        crowded = len(self._blocks) > 2 * self._engine.n_blocks
        if not self._waiting and (crowded or self._step >= self._round_end):
            self._waiting, self._announced = self._announced, self._waiting
            self._round += 1
            self._round_end = self._step + self._round_steps
        self._look()
        due = STEP_BLOCKS if crowded else -(-len(self._waiting) // max(1, self._round_end - self._step))
        return [self._engine.event(announced) for announced in self._tell(min(due, STEP_BLOCKS))]

    # -- finished requests -----------------------------------------------------------------------------------

    def _look(self) -> None:
        left = STEP_BLOCKS
        while left > 0 and self._finished:
            request = self._finished[0]
            hashes = self._engine.hashes_of(request)
            end = min(len(hashes), self._looked + left)
            at = self._looked
            while not self._fresh and at < end and self._is_known(hashes[at]):
                at += 1
            self._fresh = at < end
            ended = self._fresh and not self._remember(request, hashes, at, end)
            left -= end - self._looked + 1
            self._looked = end
            if ended or end == len(hashes):
                self._finished.popleft()
                self._looked, self._fresh = 0, False

    def _is_known(self, name: bytes) -> bool:
        block = self._blocks.get(name)
        return block is not None and self._follows(block)

    def _follows(self, block: _Block) -> bool:
        """Whether each round announces this block after its parent."""
        parent = self._blocks.get(block.parent) if block.parent is not None else None
        return block.parent is None or (parent is not None and parent.number < block.number)

    def _remember(self, request: Any, hashes: Sequence[bytes], first: int, end: int) -> bool:
        """Add these blocks of a request, of which the first is unknown; returns False if one is not cached."""
        size = self._block_tokens
        tokens = array("I", request.all_token_ids[first * size : end * size])
        extra = self._engine.extra_keys(request, first * size, end - first)
        lora = request.lora_request
        adapter = (lora.lora_int_id, lora.lora_name) if lora is not None else None
        is_cached, blocks, waiting = self._engine.is_cached, self._blocks, self._waiting
        parent = hashes[first - 1] if first else None
        if parent is not None and parent not in blocks:
            return False
        for at in range(first, end):
            name = hashes[at]
            if not is_cached(name):
                return False  # the blocks after it cannot be found either
            begin = (at - first) * size
            own = tokens[begin : begin + size]
            number, self._next_number = self._next_number, self._next_number + 1
            blocks[name] = block = _Block(name, parent, own, extra[at - first], adapter, number, self._round)
            waiting.append(block)
            parent = name
        return True

    # -- rounds ----------------------------------------------------------------------------------------------

    def _tell(self, turns: int) -> list[AnnouncedBlocks]:
        announced: list[AnnouncedBlocks] = []
        last: bytes | None = None
        for _ in range(min(turns, len(self._waiting))):
            block = self._waiting.popleft()
            if self._blocks.get(block.name) is not block:
                continue
            if not self._engine.is_cached(block.name) or not self._follows(block):
                del self._blocks[block.name]
                continue
            self._announced.append(block)
            if block.round == self._round:
                continue  # vLLM has announced it in this round
            if last is None or block.parent != last or block.adapter != announced[-1].adapter:
                announced.append(AnnouncedBlocks([], block.parent, [], [], block.adapter))
            announced[-1].hashes.append(block.name)
            announced[-1].tokens.extend(block.tokens)
            announced[-1].extra_keys.append(block.extra)
            last = block.name
        while len(self._blocks) > 4 * self._engine.n_blocks:
            oldest = (self._waiting or self._announced).popleft()
            if self._blocks.get(oldest.name) is oldest:
                del self._blocks[oldest.name]
        return announced
