"""The order of requests that wait: fair between tenants, and by deadline within a tenant.

    tag of a tenant = max(virtual time, tokens that it was served by, divided by its weight)

The tenant with the lowest tag is served next; serving a request sets the virtual time to its tenant's tag, and adds the
request's tokens by weight to that (start-time fair queueing, Goyal, Vin and Cheng 1996).  So

1. tenants with requests here get tokens in proportion to their weights, within a prompt of each;
2. a tenant that had nothing here for a while is served next, but gets nothing for the time before;
3. within a tenant the request with the earliest `order_s` is next, so each is when its time has come.

A request whose `lane` may not be served now (its engines have no room) is passed over, without a loss for its tenant.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable


class Waiter:
    """A request, as the line sees it. `order_s` must not change while it is in a line."""

    def __init__(
        self,
        number: int,
        *,
        tenant: str = "",
        weight: float = 1.0,
        lane: Hashable = "",
        order_s: float = 0.0,
        tokens: int = 1,
        size_bytes: int = 0,
    ) -> None:
        """`number`: differs from all others', and decides between equal times."""
        self.number = number
        self.tenant = tenant
        self.weight = weight
        self.lane = lane
        self.order_s = order_s
        self.tokens = tokens
        self.size_bytes = size_bytes

    @property
    def order(self) -> tuple[float, int]:
        """The lowest is next."""
        return self.order_s, self.number


class Flow:
    """What waits of one tenant."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        """Of the newest request."""
        self.lanes: dict[Hashable, list[Waiter]] = {}
        """In order; none is empty."""
        self.count = 0
        self.size_bytes = 0
        self.tokens = 0

    def add(self, one: Waiter, sign: int) -> None:
        """Count a request, or with -1 no longer."""
        self.count += sign
        self.size_bytes += sign * one.size_bytes
        self.tokens += sign * one.tokens


class Line:
    """See the module. Without clock and I/O."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}
        """By tenant; none is empty."""
        self._virtual = 0.0
        self._served: dict[str, float] = {}
        """By tenant, where it is above the virtual time."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return sum(flow.count for flow in self.flows.values())

    @property
    def size_bytes(self) -> int:
        """Of all requests."""
        return sum(flow.size_bytes for flow in self.flows.values())

    def push(self, one: Waiter) -> None:
        """Add a request."""
        flow = self.flows.setdefault(one.tenant, Flow(one.weight))
        flow.weight = one.weight
        bisect.insort(flow.lanes.setdefault(one.lane, []), one, key=lambda each: each.order)
        flow.add(one, 1)

    def remove(self, one: Waiter) -> bool:
        """Take a request out; False: it is not here."""
        flow = self.flows.get(one.tenant)
        lane = flow.lanes.get(one.lane) if flow is not None else None
        if flow is None or lane is None:
            return False
        place = bisect.bisect_left(lane, one.order, key=lambda each: each.order)
        if place == len(lane) or lane[place] is not one:
            return False
        del lane[place]
        if not lane:
            del flow.lanes[one.lane]
        flow.add(one, -1)
        if not flow.count:
            del self.flows[one.tenant]
        return True

    def first(self, may: Callable[[Hashable], bool]) -> Waiter | None:
        """Return the next request of those whose lane may be served; it stays here."""
        best: Waiter | None = None
        best_key: tuple[float, tuple[float, int]] | None = None
        for tenant, flow in self.flows.items():
            heads = [lane[0] for name, lane in flow.lanes.items() if may(name)]
            if not heads:
                continue
            head = min(heads, key=lambda each: each.order)
            key = self._tag(tenant), head.order
            if best_key is None or key < best_key:
                best, best_key = head, key
        return best

    def served(self, tenant: str, weight: float, tokens: float) -> None:
        """A request of the tenant was served, whether it waited or not; `tokens`: what that takes."""
        self._virtual = max(self._virtual, self._tag(tenant))
        self._served[tenant] = self._virtual + tokens / weight
        if len(self._served) > len(self.flows) + 64:
            self._served = {name: tag for name, tag in self._served.items() if tag > self._virtual}

    def _tag(self, tenant: str) -> float:
        return max(self._virtual, self._served.get(tenant, 0.0))

    def tokens_before(self, one: Waiter) -> float:
        """Return about how many tokens are served before a request that would be pushed now."""
        own = self.flows.get(one.tenant)
        before = 0
        if own is not None:
            before = sum(
                each.tokens for lane in own.lanes.values() for each in lane if each.order < one.order
            )
        total = float(before)
        for tenant, flow in self.flows.items():
            if tenant != one.tenant:
                total += min(float(flow.tokens), before * flow.weight / one.weight)
        return total

    def heaviest(self, most_count: int, most_bytes: int) -> str:
        """Return the tenant that takes the most of a line's bounds, by its weight. Something must wait."""

        def share(tenant: str) -> float:
            flow = self.flows[tenant]
            return max(flow.count / most_count, flow.size_bytes / most_bytes) / flow.weight

        return max(self.flows, key=share)

    def last(self, tenant: str) -> Waiter:
        """Return the request of a tenant that would be served last. It has one."""
        return max((lane[-1] for lane in self.flows[tenant].lanes.values()), key=lambda each: each.order)
