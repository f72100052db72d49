"""Times how long an engine takes for the prompts that it is sent: over busy periods, since prompts share its steps.

    no prompt waits ─▶ begin ─▶ (add) … first tokens … ─▶ none waits any more: end       ─▶ report for each prompt

A short prompt whose step a long one joined seems slow, and the long one behind it seems fast; together they tell
how fast the engine is.  How many tokens were computed is told when an answer ends, if the engine tells it at all: until
all prompts have reported, the expected number stands for it.  A period of which a prompt failed, or was loaded rather
than computed, tells nothing.

At a busy engine some prompt may wait for hours, so a long period is cut into *pieces*, each with the prompts whose
first token came in it.  At a cut the engine has computed a part of the prompts that come next, which counts for the
next piece.  That would be wrong by up to a step, so

1. a piece ends at a first token of the prompt that waited longest, so no long prompt is half computed beside it; it has
   at least `FIRST_TOKENS`, and takes `GAPS` times as long as the longest time between two of them;
2. a piece is a sample only if it lies between two cuts: what it has from the piece before it is, on the average, what
   it leaves to the next.  A period with one cut is a sample as a whole;
3. the sample of a piece has its rate, but is noted as of `PIECE_TOKENS`: pieces take a whole number of steps, so over
   their own tokens, which are right on the average only, long ones would seem to take no longer than short ones.
"""

from __future__ import annotations

from kvstrata.gateway.routing.model import EngineState
from kvstrata.gateway.routing.rates import Rates, Sample

AGREES = 0.05
"""A report that differs by less from what was expected changes nothing."""
FIRST_TOKENS = 16
GAPS = 16.0
PIECE_TOKENS = 1 << 16


class Piece:
    """A part of a busy period, or all of it: the prompts whose first tokens came in it."""

    def __init__(self, began_s: float, running: float, *, came_whole: bool) -> None:
        """`running`: requests that ran when it began. `came_whole`: a prompt waits whose answer comes whole."""
        self.began_s = began_s
        self.running = running
        self.came_whole = came_whole
        self.first_tokens = 0
        self.gap_s = 0.0
        """The longest time to a first token since the one before it."""
        self.moved_s = began_s
        """When a first token came for the last time."""
        self.spoiled = False
        self.cut = False
        """Whether it lies between two cuts."""
        self.part_of: Piece | None = None
        """The piece that it has become a part of."""
        self._seconds = 0.0
        """0: it lasts, or was given up."""
        self._expected = 0
        self._computed = 0
        self._reported = 0
        self._rates: Rates | None = None
        self._engine = ""
        self._sample: Sample | None = None

    def first_token(self, expected_tokens: int, now_s: float) -> None:
        """A prompt has been computed, with so many tokens as far as it is known."""
        self.first_tokens += 1
        self._expected += expected_tokens
        self.gap_s = max(self.gap_s, now_s - self.moved_s)
        self.moved_s = now_s

    @property
    def long_enough(self) -> bool:
        """Whether it may be cut at the last first token."""
        return self.first_tokens >= FIRST_TOKENS and self.moved_s - self.began_s >= GAPS * self.gap_s

    def join(self, later: Piece) -> None:
        """Become a part of the piece that followed."""
        self.part_of = later
        later.began_s, later.running = self.began_s, self.running
        later.came_whole |= self.came_whole
        later.first_tokens += self.first_tokens
        later.spoiled |= self.spoiled
        later._expected += self._expected
        later._computed += self._computed
        later._reported += self._reported

    def spoil(self) -> None:
        """What it tells is not known any more."""
        self.spoiled = True
        self._retract()

    def end(self, now_s: float, rates: Rates, engine: str) -> None:
        """It is complete: a sample."""
        self._seconds, self._rates, self._engine = now_s - self.began_s, rates, engine
        if not self.spoiled:
            self._observe(self._expected)

    def report(self, computed_tokens: int) -> None:
        """A prompt's answer told how many of its tokens were computed."""
        self._computed += computed_tokens
        self._reported += 1
        if self.spoiled or not self._seconds or self._reported < self.first_tokens:
            return
        if abs(self._computed - self._expected) > AGREES * self._expected:
            self._retract()
            self._observe(self._computed)

    def _observe(self, tokens: int) -> None:
        assert self._rates is not None
        seconds = self._seconds
        if self.cut and tokens:
            tokens, seconds = PIECE_TOKENS, seconds * PIECE_TOKENS / tokens
        self._sample = self._rates.observe(self._engine, tokens, seconds, self.running, whole=self.came_whole)

    def _retract(self) -> None:
        if self._sample is not None and self._rates is not None:
            self._rates.retract(self._sample)
            self._sample = None


class BusyPeriod:
    """See the module. Belongs to its engine as long as it lasts, and its pieces to their prompts."""

    def __init__(self, rates: Rates, engine: str, began_s: float, running: float) -> None:
        self._rates = rates
        self._engine = engine
        self._head: Piece | None = None
        """What was before the only cut."""
        self._cuts = 0
        self._piece = Piece(began_s, running, came_whole=False)

    def add(self, expected_tokens: int, *, streams: bool = True) -> TimedPrompt:
        """One more prompt is sent to the engine, which is expected to compute so many tokens.

        `streams`: its answer does not come whole.
        """
        self._piece.came_whole |= not streams
        return TimedPrompt(self, expected_tokens)

    def first_token(self, expected_tokens: int, now_s: float, load: EngineState, *, oldest: bool) -> Piece:
        """A prompt that was added has been computed; returns the piece that tells of it.

        `load`: of the engine, after this first token. `oldest`: none waits that was sent before it.
        """
        piece = self._piece
        piece.first_token(expected_tokens, now_s)
        if oldest and piece.long_enough:
            self._cut(now_s, load)
        return piece

    def _cut(self, now_s: float, load: EngineState) -> None:
        self._cuts += 1
        if self._cuts == 1:
            self._head = self._piece
        else:
            self._head, self._piece.cut = None, True
            self._piece.end(now_s, self._rates, self._engine)
        self._piece = Piece(now_s, load.running, came_whole=load.moved_s is None)

    @property
    def running(self) -> float:
        """Requests that ran when the present piece began, under which its sample will be noted."""
        return self._piece.running

    def spoil(self) -> None:
        """What the present prompts tell is not known any more."""
        for piece in (self._head, self._piece):
            if piece is not None:
                piece.spoil()

    def spoil_piece(self) -> None:
        """A prompt that waits has failed."""
        self._piece.spoil()

    def end(self, now_s: float) -> None:
        """No prompt waits any more."""
        if self._head is not None:
            self._head.join(self._piece)
            self._head = None
        if self._cuts < 2:
            self._piece.end(now_s, self._rates, self._engine)


class TimedPrompt:
    """A prompt in a busy period. Belongs to who sent it."""

    def __init__(self, period: BusyPeriod, expected_tokens: int) -> None:
        self._period = period
        self._expected = expected_tokens
        self._piece: Piece | None = None
        """None: it has no first token."""

    def _counts_in(self) -> Piece | None:
        piece = self._piece
        while piece is not None and piece.part_of is not None:
            piece = piece.part_of
        return piece

    def first_token(self, now_s: float, load: EngineState, *, oldest: bool) -> None:
        """See BusyPeriod.first_token. May be repeated."""
        if self._piece is None:
            self._piece = self._period.first_token(self._expected, now_s, load, oldest=oldest)

    def spoil(self) -> None:
        """How long it takes tells nothing: it failed, was loaded, or was not timed well."""
        piece = self._counts_in()
        if piece is None:
            self._period.spoil_piece()
        else:
            piece.spoil()

    def report(self, computed_tokens: int) -> None:
        """Its answer told how many of its tokens were computed."""
        piece = self._counts_in()
        if piece is not None:
            piece.report(computed_tokens)
