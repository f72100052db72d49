"""Measures how fast engines compute prompts: tokens a second, by how many requests run meanwhile.

A sample is a prompt whose first token came: the tokens that were computed for it, the seconds from the end of its
queueing to the first token, and the requests that ran meanwhile.  Samples fall into classes of load by powers of two:
0, 1, 2-3, 4-7, and so on.  A rate is the median of a class, each sample weighted by its tokens: an outlier moves it
only if such samples have half of all tokens, and short prompts, whose time is mostly overhead, hardly count.

1. At most `MAX_SAMPLES` newest samples are kept for a class, at most `MAX_ENGINES` engines.
2. A class without samples takes those of the nearest one that has some, the lower of two.
3. An engine without samples has the median rate of the others; without any it has `assumed_tokens_s`.
4. An engine has the median rate of all as long as that lies within the middle half of its own samples: engines that
   are alike must not seem to differ by chance, or the one that seems fastest would get every prompt.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import NamedTuple

MAX_SAMPLES = 64
MAX_CLASSES = 9
"""The last has 128 running requests or more."""
MAX_ENGINES = 4_096


class Rate(NamedTuple):
    """A rate, and what it rests on."""

    tokens_s: float
    age_s: float
    """Since the newest sample of the class; infinite for a rate of other engines or an assumed one."""
    samples: int


class Sample(NamedTuple):
    """One prompt."""

    tokens_s: float
    tokens: int
    at_s: float


def load_class(running: float) -> int:
    """Return the class of a load."""
    return min(MAX_CLASSES - 1, int(max(0.0, running)).bit_length())


def weighted_median(samples: list[tuple[float, int]], share: float = 0.5) -> float:
    """Return the value at which a share of the weight is reached; (value, weight) pairs, at least one."""
    wanted, passed = share * sum(weight for _, weight in samples), 0
    for value, weight in sorted(samples):
        passed += weight
        if passed >= wanted:
            return value
    raise AssertionError("weights are positive")


class Rates:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self, assumed_tokens_s: float) -> None:
        if not (math.isfinite(assumed_tokens_s) and assumed_tokens_s > 0):
            raise ValueError(f"assumed_tokens_s: {assumed_tokens_s}; it must be a finite number above 0")
        self._assumed_tokens_s = assumed_tokens_s
        self._samples: OrderedDict[str, dict[int, deque[Sample]]] = OrderedDict()
        """By engine, the least recently observed first; then by class."""

    def observe(self, engine: str, tokens: int, seconds: float, running: float, now_s: float) -> bool:
        """Add a sample; return whether it says anything: a prompt without computed tokens or time does not."""
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return False
        classes = self._samples.setdefault(engine, {})
        self._samples.move_to_end(engine)
        if len(self._samples) > MAX_ENGINES:
            self._samples.popitem(last=False)
        kept = classes.setdefault(load_class(running), deque(maxlen=MAX_SAMPLES))
        kept.append(Sample(tokens / seconds, tokens, now_s))
        return True

    def forget(self, engine: str) -> None:
        """Drop an engine that has gone or was restarted."""
        self._samples.pop(engine, None)

    def rate(self, engine: str, running: float, now_s: float) -> Rate:
        """Return the engine's rate under a load, by rules 2 and 3."""
        own = self._of(engine, running)
        rates = sorted(
            weighted_median([(sample.tokens_s, sample.tokens) for sample in self._of(other, running)])
            for other in self._samples
        )
        usual = rates[(len(rates) - 1) // 2] if rates else self._assumed_tokens_s
        if not own:
            return Rate(usual, math.inf, 0)
        samples = [(sample.tokens_s, sample.tokens) for sample in own]
        tokens_s = weighted_median(samples)
        if weighted_median(samples, 0.25) <= usual <= weighted_median(samples, 0.75):
            tokens_s = usual
        return Rate(tokens_s, max(0.0, now_s - own[-1].at_s), len(own))

    def knows(self, engine: str) -> bool:
        """Return whether the engine has samples of its own."""
        return engine in self._samples

    def _of(self, engine: str, running: float) -> deque[Sample]:
        classes = self._samples.get(engine)
        if not classes:
            return deque()
        wanted = load_class(running)
        return classes[min(classes, key=lambda each: (abs(each - wanted), each))]
