"""How long engines take for the tokens of answers, and how long answers are.

    seconds a token = f · (α + β · R)        R: requests in flight at the engine, this one included

α and β hold for all engines, f is one engine's deviation from them.  An answer that has ended is an observation: its
seconds a token, the mean of R meanwhile, and the prompt tokens that its engine computed meanwhile for each of its
tokens.  The last is a term of its own: without it, prompts computed beside an answer would count as the answer's.

1. α and β follow from least squares of the relative errors, with each engine's f taken out of its observations, each
   of which weighs KEPT of the next one.  No term is negative.
2. Until FEWEST answers were observed nothing is known, and decoding costs nothing.
3. f is the median of an engine's newest MAX_OWN ratios of observed to expected, beside the median of all engines; 1
   below FEWEST_OWN.
4. An answer's expected length is the mean of its model's answers, the newer weighing more; for a new model that of all.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from typing import NamedTuple

KEPT = 0.998
FEWEST, FEWEST_OWN, MAX_OWN = 16, 8, 64
EACH = 8
"""So many answers are observed between two fits, which take some 0.1 ms."""
LEAST_TOKENS = 8
"""A shorter answer tells little of a token's time."""
LEAST_S, MOST_S = 1e-5, 100.0
"""An answer whose tokens took less or more tells nothing."""
MOST_FACTOR = 8.0
"""f is at most this, and at least 1 / MOST_FACTOR: engines themselves tell how many tokens they answered."""
ANSWERS_KEPT = 0.99
MAX_ENGINES, MAX_MODELS = 4_096, 1_024
_RIDGE = 1e-6
"""Keeps a term that never varies from taking any value."""


class Decoded(NamedTuple):
    """What is known of an answer from its first token to its end."""

    seconds: float
    requests: float
    """Mean number of requests in flight at its engine."""
    prompt_tokens: int
    """Computed by its engine meanwhile."""


class Line(NamedTuple):
    """`each_s` for each request in flight, beside `alone_s`."""

    alone_s: float = 0.0
    each_s: float = 0.0


class DecodeRates:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self) -> None:
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._observed = 0
        self._terms = (0.0, 0.0, 0.0)
        self._ratios: OrderedDict[str, deque[float]] = OrderedDict()
        """By engine, the least recently observed first."""
        self._medians: dict[str, float] = {}
        self._usual = 1.0
        self._lengths: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By model: (weight, tokens) of its answers; "": of all."""

    def observe(self, engine: str, model: str, decoded: Decoded, tokens: int) -> None:
        """An answer of so many tokens has ended."""
        for name in ("", model):
            weight, total = self._lengths.pop(name, (0.0, 0.0))
            self._lengths[name] = ANSWERS_KEPT * weight + 1.0, ANSWERS_KEPT * total + tokens
        if len(self._lengths) > MAX_MODELS:
            self._lengths.popitem(last=False)
        seconds = decoded.seconds / max(1, tokens - 1)
        if tokens < LEAST_TOKENS or not LEAST_S <= seconds <= MOST_S:
            return
        row = (1.0, decoded.requests, decoded.prompt_tokens / (tokens - 1))
        if self._observed >= FEWEST:
            expected = sum(x * term for x, term in zip(row, self._terms, strict=True))
            own = self._ratios.setdefault(engine, deque(maxlen=MAX_OWN))
            own.append(seconds / expected if expected > 0 else 1.0)
            if len(own) >= FEWEST_OWN:
                self._medians[engine] = statistics.median(own)
            self._ratios.move_to_end(engine)
            if len(self._ratios) > MAX_ENGINES:
                self.forget(next(iter(self._ratios)))
        self._observed += 1
        seconds /= self._factor(engine)
        for i, x in enumerate(row):
            self._products[i] = KEPT * self._products[i] + x / seconds
            for j, y in enumerate(row):
                self._squares[i][j] = KEPT * self._squares[i][j] + x * y / seconds**2
        if self._observed >= FEWEST and self._observed % EACH == 0:
            self._terms = _fitted(self._squares, self._products)
            self._usual = statistics.median(self._medians.values()) if self._medians else 1.0

    def forget(self, engine: str) -> None:
        """Drop an engine that has gone or was restarted."""
        self._ratios.pop(engine, None)
        self._medians.pop(engine, None)

    def line(self, engine: str) -> Line:
        """The seconds of a token at an engine."""
        factor = self._factor(engine)
        return Line(factor * self._terms[0], factor * self._terms[1])

    def _factor(self, engine: str) -> float:
        found = self._medians.get(engine, self._usual) / self._usual
        return min(max(found, 1 / MOST_FACTOR), MOST_FACTOR)

    def answer_tokens(self, model: str) -> float:
        """The expected length of an answer; 0: nothing is known."""
        weight, total = self._lengths.get(model) or self._lengths.get("", (0.0, 0.0))
        return total / weight if weight else 0.0


def _fitted(squares: list[list[float]], products: list[float]) -> tuple[float, float, float]:
    """The terms of least squares; one that would be negative is 0, and the others are found without it."""
    terms, kept = [0.0, 0.0, 0.0], [0, 1, 2]
    while kept:
        found = _solved([[squares[i][j] for j in kept] for i in kept], [products[i] for i in kept])
        least, worst = min((term * math.sqrt(squares[i][i]), i) for term, i in zip(found, kept, strict=True))
        if least >= 0:
            for term, i in zip(found, kept, strict=True):
                terms[i] = term
            break
        kept.remove(worst)
    return terms[0], terms[1], terms[2]


def _solved(rows: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a few linear equations, by Gauss-Jordan elimination."""
    size = len(right)
    made = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for i in range(size):
        made[i][i] *= 1.0 + _RIDGE
    for i in range(size):
        pivot = made[i][i]
        if not pivot:
            made[i] = [0.0] * (size + 1)
            continue
        made[i] = [value / pivot for value in made[i]]
        for j in range(size):
            if j != i:
                factor = made[j][i]
                made[j] = [a - factor * b for a, b in zip(made[j], made[i], strict=True)]
    return [row[-1] for row in made]
