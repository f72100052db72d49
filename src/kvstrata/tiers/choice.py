"""Load or recompute: how much of what the tiers have of a prompt is loaded, and how much is left to the engine.

The time of a load grows with its bytes; computing a chunk takes the longer the deeper the chunk lies in its prompt.  So
of what one tier has, either all is loaded or nothing.  What lies behind chunks that are left is of no use to the
engine, and is left as well: a choice is the chunk at which the hit ends.

1. Nothing is left unless both times were measured: a tier of which fewer than LEAST_BATCHES loads are known costs
   nothing here, and the caller asks for no choice while the engine's speed is not known.
2. If a tier becomes slower, and nothing else changes, the hit never becomes longer.
3. Something is left only if that saves SAVES_S: less is noise, and the engine has other prompts to compute.
4. A tier that is left is measured on: by a load of the prompt's last PROBE_BYTES, which no request waits for, PROBE_S
   after its last measurement.  A smaller load would tell little of a large one.  One choice in PROBE_EVERY goes the
   other way if that is expected to take at most PROBE_COST times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

SAVES_S = 0.005
PROBE_S, PROBE_BYTES = 5.0, 64 << 20
PROBE_EVERY, PROBE_COST = 100, 2.0

Seconds = Callable[[int], float]


def best_end(ends: Iterable[int], load_s: Seconds, compute_s: Seconds, *, probes: bool = False) -> int:
    """At which of these ends of the hit the whole prompt is expected soonest; the longest hit unless it is far worse.

    `load_s(end)`: seconds to load what lies before an end, which no longer hit makes less; `compute_s(end)`: to compute
    what lies behind it.  `probes`: take the other way, if it costs little.
    """
    times: Mapping[int, float] = {end: load_s(end) + compute_s(end) for end in ends}
    longest = max(times)
    best = min(times, key=lambda end: (times[end], -end))
    if times[longest] - times[best] < SAVES_S:
        best = longest
    if probes and len(times) > 1:
        other = min(times) if best == longest else longest
        if times[other] <= PROBE_COST * times[best]:
            return other
    return best
