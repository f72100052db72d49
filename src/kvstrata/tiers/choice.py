"""Load or recompute: decides how many of a prompt's chunks are loaded from tiers, and how many the engine computes.

The time of a load grows with its bytes; the time to compute a chunk grows with its depth in the prompt.  So either all
of one tier's chunks are loaded, or none.  Chunks behind a skipped chunk are useless to the engine and are skipped too:
a choice is the chunk at which the hit ends.

1. Chunks are skipped only if both times were measured: a tier with fewer than LEAST_BATCHES measured loads costs
   nothing here, and the caller asks for no choice while the engine's speed is unknown.
2. If a tier becomes slower, and nothing else changes, the hit never becomes longer.
3. Chunks are skipped only if that saves SAVES_S: less is noise, and the engine has other prompts to compute.
4. A skipped tier is still measured: PROBE_S after its last measurement, by a load of the prompt's last PROBE_BYTES for
   which no request waits; a smaller load would say little about a large one.  One choice in PROBE_EVERY is reversed if
   that is expected to take at most PROBE_COST times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

SAVES_S = 0.005
PROBE_S, PROBE_BYTES = 5.0, 64 << 20
PROBE_EVERY, PROBE_COST = 100, 2.0

Seconds = Callable[[int], float]


def best_end(ends: Iterable[int], load_s: Seconds, compute_s: Seconds, *, probes: bool = False) -> int:
    """The end of the hit with which the whole prompt is expected soonest; the longest hit unless it is far worse.

    `load_s(end)`: seconds to load the chunks before an end, which must not decrease with it; `compute_s(end)`: seconds
    to compute the chunks after it.  `probes`: choose the other alternative, if that costs little.
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
