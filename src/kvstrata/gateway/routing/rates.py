"""Estimates how fast engines are: seconds per prompt, seconds per token of an answer, and the length of answers.

    seconds of prompts = f · (a + b · R + (1 / μ + c · R) · u)     R: running requests, u: tokens that were computed
    seconds a token    = f · (α + β · R + γ · p)                   R: requests in flight, p: prompt tokens computed
                                                                   meanwhile for each of the answer's tokens
All engines share the terms; f is one engine's deviation from them, separate for prompts and answers.  Without the last
term of answers, the time of prompts computed beside an answer would be attributed to the answer.

1. Terms are fitted by least squares of the relative errors, with each engine's f divided out of its observations; an
   observation weighs KEPT times as much as the next one.  No term is negative.  Time that the observations cannot
   attribute to either tokens or a constant is attributed to the tokens.
2. f is 1 unless more of an engine's newest ratios of observed to expected time are above 1, or below, than chance
   explains; then it is their median.  Equal engines must not seem to differ, or the one that seems fastest gets every
   prompt: trusting single samples cost a tenth of the 99th percentile of a real trace.
3. Samples of prompts whose answers are not streamed include the time of the answer.  They count only as long as no
   engine has other samples.
4. Before the first sample the rate of prompts is `assumed_tokens_s`; until FEWEST answers were observed, the time per
   token is ASSUMED, and until the first answer, the expected length is ASSUMED_TOKENS.
5. An answer's expected length is the mean of its model's answers, weighted towards new ones; for a new model, the mean
   of all models.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import NamedTuple

from kvstrata.gateway.routing.model import LoadPath, Tier

KEPT = 0.998
FEWEST, MAX_OWN = 16, 64
EACH = 8
"""Number of observations between two fits, since a fit takes about 0.1 ms."""
FEW, TWICE = 3, 2.0
"""Number of prompts or answers that suffice as evidence if an engine is TWICE as fast or slow as expected."""
ALIKE = 1.15
"""Smallest deviation from 1 that counts, as a factor."""
DEVIATIONS = 2.0
"""Standard deviations from an even split of its samples beyond which an engine counts as different."""
MOST_FACTOR = 8.0
"""Maximum of f and of 1 / f, since token counts come from the engines themselves and may be wrong."""
MOST_RATIO = 16.0
"""Maximum ratio of expected to observed time; a larger one counts as this."""
LEAST_TOKENS = 8
"""Minimum length of an answer that counts as a sample of the time per token."""
LEAST_S, MOST_S = 1e-5, 100.0
"""Range of plausible times per token; an answer outside of it is no sample."""
ANSWERS_KEPT = 0.99
MAX_ENGINES, MAX_MODELS = 4_096, 1_024
ASSUMED_GAIN, ASSUMED_LATENCY_S = 8.0, 0.01
"""Assumed rate of an unmeasured path, as a multiple of the engine's prefill rate, and its assumed latency."""


class Sample(NamedTuple):
    """One observation of a Fit."""

    engine: str
    row: tuple[float, ...]
    seconds: float
    factor: float
    """The engine's f at the time of the observation."""
    number: int
    prompts: int
    """Number of prompts or answers timed together."""


class Fit:
    """The terms of all engines, and the factor f of each (rules 1 and 2)."""

    def __init__(self, ridge: tuple[float, ...]) -> None:
        """`ridge`: by term, the relative weight of ridge regression, which keeps it small if others explain as much."""
        self._ridge, size = ridge, len(ridge)
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        self._weight = 0.0
        """Sum of the observations' weights; the newest weighs 1."""
        self.observed = 0
        self.terms = (0.0,) * size
        """All 0: unknown."""
        self._samples: OrderedDict[str, deque[Sample]] = OrderedDict()
        """By engine, the least recently observed first."""
        self._factors: dict[str, float] = {}
        self._stale: set[str] = set()
        """Engines observed since the last fit; only a fit invalidates their factors, since finding one takes 50 µs."""

    def observe(self, engine: str, row: tuple[float, ...], seconds: float, prompts: int = 1) -> Sample:
        """Add an observation of more than 0 seconds."""
        expected = self.seconds(row)
        seconds = max(seconds, expected / MOST_RATIO)
        sample = Sample(engine, row, seconds, self.factor(engine), self.observed, prompts)
        own = self._samples.setdefault(engine, deque(maxlen=MAX_OWN))
        own.append(sample)
        self._samples.move_to_end(engine)
        if len(self._samples) > MAX_ENGINES:
            self.forget(next(iter(self._samples)))
        self._stale.add(engine)
        self.observed += 1
        self._add(sample, 1.0)
        if self.observed <= FEWEST or self.observed % EACH == 0:
            self._fit()
            for name in self._stale:
                self._factors.pop(name, None)
            self._stale.clear()
        return sample

    def retract(self, sample: Sample) -> None:
        """Remove an observation that turned out to be wrong; no effect if it has aged out."""
        own = self._samples.get(sample.engine)
        if own is not None and sample in own:
            own.remove(sample)
            self._factors.pop(sample.engine, None)
            self._add(sample, -(KEPT ** (self.observed - 1 - sample.number)))
            self._fit()

    def forget(self, engine: str) -> None:
        """Drop the samples of an engine that has left or was restarted."""
        self._samples.pop(engine, None)
        self._factors.pop(engine, None)

    def samples(self, engine: str) -> int:
        """Number of an engine's observations that are kept."""
        return len(self._samples.get(engine, ()))

    def seconds(self, row: tuple[float, ...]) -> float:
        """Expected seconds at an engine with f = 1."""
        return float(sum(map(operator.mul, row, self.terms)))

    def factor(self, engine: str) -> float:
        """The factor f of an engine (rule 2)."""
        found = self._factors.get(engine)
        if found is None:
            found = 1.0
            if (
                self.observed >= FEWEST
            ):  # fewer observations come from few engines, and are no measure of others
                own = self._samples.get(engine, ())
                rows = [(one.seconds, self.seconds(one.row)) for one in own]
                if sum(one.prompts for one in own) >= FEW:
                    found = _factor([seconds / expected for seconds, expected in rows if expected > 0])
            if len(self._factors) > 2 * MAX_ENGINES:
                self._factors.clear()
            self._factors[engine] = found
        return found

    def _add(self, sample: Sample, weight: float) -> None:
        seconds, kept = sample.seconds / sample.factor, KEPT if weight > 0 else 1.0
        self._weight = kept * self._weight + weight
        for i, x in enumerate(sample.row):
            self._products[i] = kept * self._products[i] + weight * x / seconds
            for j, y in enumerate(sample.row):
                self._squares[i][j] = kept * self._squares[i][j] + weight * x * y / seconds**2

    def _fit(self) -> None:
        """Least squares; a term that would be negative is 0, and the others are found without it."""
        terms = [0.0] * len(self.terms)
        if self._weight < 0.5:  # all observations were retracted, and only rounding errors are left
            self._squares, self._products = [[0.0] * len(terms) for _ in terms], [*terms]
        squares, kept = self._squares, [i for i in range(len(terms)) if self._squares[i][i] > 0]
        while kept:
            rows = [[squares[i][j] * (1.0 + self._ridge[i] * (i == j)) for j in kept] for i in kept]
            found = _solved(rows, [self._products[i] for i in kept])
            least, worst = min(
                (term * math.sqrt(squares[i][i]), i) for term, i in zip(found, kept, strict=True)
            )
            if least >= 0:
                for term, i in zip(found, kept, strict=True):
                    terms[i] = term
                break
            kept.remove(worst)
        self.terms = tuple(terms)


def _factor(ratios: list[float]) -> float:
    if not ratios:
        return 1.0
    slower, faster = sum(ratio > 1.0 for ratio in ratios), sum(ratio < 1.0 for ratio in ratios)
    median = statistics.median(ratios)
    few = 1.0 / TWICE < median < TWICE and abs(slower - faster) <= DEVIATIONS * math.sqrt(slower + faster)
    if few or 1.0 / ALIKE < median < ALIKE:
        return 1.0
    return min(max(median, 1.0 / MOST_FACTOR), MOST_FACTOR)


def _solved(rows: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a few linear equations, by Gauss-Jordan elimination."""
    made = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for i in range(len(made)):
        pivot = made[i][i]
        if pivot <= 0:
            made[i] = [0.0] * (len(made) + 1)
            continue
        made[i] = [value / pivot for value in made[i]]
        for j in range(len(made)):
            if j != i:
                factor = made[j][i]
                made[j] = [a - factor * b for a, b in zip(made[j], made[i], strict=True)]
    return [row[-1] for row in made]


class PrefillRates:
    """Prefill rates of engines, in tokens a second. Belongs to the event loop."""

    def __init__(self, assumed_tokens_s: float) -> None:
        self._assumed_tokens_s = assumed_tokens_s
        self._fits = {whole: Fit((1e-2, 1e-2, 1e-6, 1e-3)) for whole in (False, True)}
        """By whether the samples include whole answers (rule 3)."""

    @property
    def _fit(self) -> Fit:
        return self._fits[not self._fits[False].observed]

    def observe(
        self,
        engine: str,
        tokens: int,
        seconds: float,
        running: float,
        *,
        prompts: int = 1,
        whole: bool = False,
    ) -> tuple[Fit, Sample] | None:
        """Add a sample, and return it with its fit for `retract`; None: no tokens or no time, so no sample.

        `running`: number of requests that ran meanwhile. `prompts`: number of prompts. `whole`: some answer was not
        streamed, so the seconds include the time of that answer.
        """
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return None
        fit = self._fits[whole]
        return fit, fit.observe(engine, (1.0, running, float(tokens), tokens * running), seconds, prompts)

    def forget(self, engine: str) -> None:
        """Drop the samples of an engine that has left or was restarted."""
        for fit in self._fits.values():
            fit.forget(engine)

    def samples(self, engine: str) -> int:
        """Number of an engine's samples that count (rule 3)."""
        return self._fit.samples(engine)

    def rate(self, engine: str, running: float) -> float:
        """An engine's prefill rate beside `running` running requests, in tokens a second."""
        fit = self._fit
        _, _, token_s, each_s = fit.terms
        seconds = token_s + each_s * running
        return 1.0 / (seconds * fit.factor(engine)) if seconds > 0 else self._assumed_tokens_s

    def slowness(self, engine: str, prompts: int, tokens: int, running: float, seconds: float) -> float:
        """The factor by which an engine that has not computed these prompts yet is slower than expected; 1: not known.

        `tokens`: sum over the prompts. `running`: requests that run beside them. `seconds`: since it got the first one.
        """
        fit = self._fit
        if prompts < FEW or fit.observed < FEWEST:
            return 1.0
        expected = fit.factor(engine) * fit.seconds((prompts, prompts * running, tokens, tokens * running))
        return min(seconds / expected, MOST_FACTOR) if seconds >= TWICE * expected > 0 else 1.0


class Decoded(NamedTuple):
    """Measurements of an answer, from its first token to its end."""

    seconds: float
    requests: float
    """Mean number of requests in flight at its engine."""
    prompt_tokens: int
    """Prompt tokens that its engine computed meanwhile."""


class Line(NamedTuple):
    """Time per token of an answer: `alone_s` + `each_s` for each request in flight."""

    alone_s: float = 0.0
    each_s: float = 0.0


ASSUMED, ASSUMED_TOKENS = Line(each_s=2e-4), 256.0
"""Assumed until measured; else the engine with a popular prefix would get all requests until answers have ended."""


class DecodeRates:
    """Times per token of answers by engine, and answers' lengths by model. Belongs to the event loop."""

    def __init__(self) -> None:
        self._fit = Fit((1e-6, 1e-6, 1e-6))
        self._lengths: OrderedDict[str, tuple[float, float, float]] = OrderedDict()
        """By model ("": all models): weight of its answers, and weighted sums of their tokens and of 1 / tokens."""

    def observe(self, engine: str, model: str, decoded: Decoded, tokens: int) -> None:
        """Add a sample: an ended answer and its number of tokens."""
        seconds, is_long = decoded.seconds / max(1, tokens - 1), tokens >= LEAST_TOKENS
        if is_long and not LEAST_S <= seconds <= MOST_S:
            return
        for name in ("", model):
            weight, total, inverse = (ANSWERS_KEPT * one for one in self._lengths.pop(name, (0.0, 0.0, 0.0)))
            self._lengths[name] = weight + 1.0, total + tokens, inverse + 1.0 / max(1, tokens)
        if len(self._lengths) > MAX_MODELS:
            self._lengths.popitem(last=False)
        if is_long:
            self._fit.observe(engine, (1.0, decoded.requests, decoded.prompt_tokens / (tokens - 1)), seconds)

    def forget(self, engine: str) -> None:
        """Drop the samples of an engine that has left or was restarted."""
        self._fit.forget(engine)

    def line(self, engine: str) -> Line | None:
        """The time per token at an engine; None: not measured yet."""
        if self._fit.observed < FEWEST:
            return None
        factor = self._fit.factor(engine)
        return Line(factor * self._fit.terms[0], factor * self._fit.terms[1])

    def answer_tokens(self, model: str = "") -> tuple[float, float]:
        """The mean length of a model's answers, and the harmonic mean; 0: unknown."""
        weight, total, inverse = self._lengths.get(model) or self._lengths.get("", (0.0, 0.0, 0.0))
        return (total / weight, weight / inverse) if weight else (ASSUMED_TOKENS, 0.0)


def load_path(told: Mapping[Tier, LoadPath], tier: Tier, prefill_tokens_s: float) -> LoadPath:
    """Return the speed at which an engine with the prefill rate `prefill_tokens_s` loads KV from a tier.

    `told`: the measured speeds of its own loads from L1, and of its instance's loads from other tiers into L1.  KV from
    L2 or a peer is loaded into L1 first, and from there into the engine.
    """
    latency_s, tokens_s = ASSUMED_LATENCY_S, ASSUMED_GAIN * prefill_tokens_s
    if tier in told:
        latency_s, tokens_s = told[tier].latency_s, told[tier].tokens_s
    if tier != "l1":
        then = load_path(told, "l1", prefill_tokens_s)
        latency_s, tokens_s = latency_s + then.latency_s, 1.0 / (1.0 / tokens_s + 1.0 / then.tokens_s)
    return LoadPath(latency_s=latency_s, tokens_s=tokens_s)
