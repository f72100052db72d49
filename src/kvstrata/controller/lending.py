"""What tenants lend each other of L1 beyond their quotas.  No I/O, no clock.

A quota evicts its tenant's oldest chunks, whatever they are worth, also while another tenant has no use for the room.
Other quotas, and ones that follow the load, save hardly more (`make bench BENCH=plan_goodput`).  What saves more is to
let tenants use what the others' quotas leave, as long as nobody loses by it what its quota is for:

1. Tenants may use a part, `lent`, of what L1 has beyond their quotas; it changes by STEP, once in a *window* of
   WINDOW_S and ENOUGH chunks at least.
2. More is lent if L1 without quotas would save LEAST more than all quotas do, by the instance's forecasts.
3. Less is lent if a tenant would save LOSS more of its own seconds with its quota alone, by the same forecasts; or if
   tenants find less in the window behind a step than in the one before, by more than windows without a step differ.
4. After that nothing more is lent for HOLD_S.
"""

from __future__ import annotations

import collections
import itertools
import math

import msgspec

from kvstrata.rpc.cluster_wire import Shares, TenantShare

STEP = 0.5
WINDOW_S, ENOUGH = 1_800.0, 5_000
LEAST, LOSS = 0.01, 0.3
NOISE = 3.0
"""Standard deviations between windows without a step."""
FIRST_NOISE = 0.05
HOLD_S = 86_400.0


class Step(msgspec.Struct, frozen=True):
    """A change of what is lent."""

    lent: float
    predicted: float
    """Share of all seconds of prefill that it saves."""
    why: str = ""
    """Why less is lent than before; empty: more is."""


class Lending:
    """What the tenants of one instance lend each other."""

    def __init__(self) -> None:
        self._begun_s, self._totals = -math.inf, dict[str, tuple[int, int]]()
        """When the window began, and by tenant what had been asked for and found then."""
        self._before: float | None = None
        """Share of the last window's chunks that was found."""
        self._differs = collections.deque([FIRST_NOISE], maxlen=16)
        self._trial = False
        self._not_until_s = -math.inf
        self.measured: float | None = None
        """By how much more was found after a step to more, if this was known at the last look."""

    def step(self, now_s: float, told: Shares, whole: float) -> Step | None:
        """Look at what an instance tells; returns what is to be done.

        `whole`: share of the seconds of prefill that its L1 would save without quotas.
        """
        gain, self.measured = predicted(told, whole), None
        now = {one.tenant: (one.asked_total, one.found_total) for one in told.tenants}
        grown = [
            (after[0] - was[0], after[1] - was[1])
            for name, after in now.items()
            if (was := self._totals.get(name)) is not None
        ]
        if len(grown) < len(now) or min(itertools.chain(*grown)) < 0:  # it is new, or has restarted
            self._begun_s, self._totals, self._before, self._trial = now_s, now, None, False
            return None
        asked, found = (sum(one[at] for one in grown) for at in (0, 1))
        if asked < ENOUGH or now_s < self._begun_s + WINDOW_S:
            return None
        hit, before, trial = found / asked, self._before, self._trial
        self._begun_s, self._totals, self._before, self._trial = now_s, now, hit, False
        why = ""
        if before is not None and trial:
            self.measured = hit - before
            why = "tenants find less" if self.measured < -NOISE * self._noise else ""
        elif before is not None:
            self._differs.append(hit - before)
        for one in told.tenants:
            if saved(one, one.quota_bytes) - saved(one, one.used_bytes) > LOSS:
                why = f"{one.tenant} would save more with its quota alone"
        if why and told.lent > 0:
            self._not_until_s = now_s + HOLD_S
            return Step(max(0.0, told.lent - STEP), -STEP * gain, why)
        if not why and told.lent < 1 and gain >= LEAST and now_s >= self._not_until_s:
            self._trial = True
            return Step(min(1.0, told.lent + STEP), STEP * gain)
        return None

    @property
    def _noise(self) -> float:
        return math.sqrt(sum(one * one for one in self._differs) / len(self._differs))


def predicted(told: Shares, whole: float) -> float:
    """How much more of all seconds of prefill L1 would save without quotas than with nothing lent; 0: not known."""
    parts = sum(one.part for one in told.tenants)
    if not parts or not all(one.saved and one.used_bytes for one in told.tenants):
        return 0.0
    return whole - sum(one.part * saved(one, one.quota_bytes) for one in told.tenants) / parts


def saved(one: TenantShare, n_bytes: int) -> float:
    """What a quota of so many bytes would save a tenant: straight lines over the logarithm between what is known."""
    points = sorted((float(at), value) for at, value in one.saved.items())
    if not points or not one.used_bytes:
        return 0.0
    size = n_bytes / one.used_bytes
    if size <= points[0][0]:
        return points[0][1] * size / points[0][0]
    for (low, below), (high, above) in itertools.pairwise(points):
        if size <= high:
            return below + (above - below) * math.log(size / low) / math.log(high / low)
    return points[-1][1]
