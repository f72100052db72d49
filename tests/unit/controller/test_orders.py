"""Orders of a cluster and the system's clock, which may be set."""

from __future__ import annotations

import msgspec

from kvstrata.controller.orders import PINS, Orders, Pin

HOUR_MS = 3_600_000


class SetClock:
    """A clock whose two readings the test sets."""

    def __init__(self) -> None:
        self.now_s, self.wall_ms = 1_000.0, 1_700_000_000_000

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return self.wall_ms


async def test_a_pin_lasts_as_long_as_it_was_given_wherever_the_clock_is_set() -> None:
    clock = SetClock()
    orders = Orders(clock)
    pin = Pin("claim", "a", 3, clock.unix_ms() + HOUR_MS, 7, 1, kept=True)
    await orders.put_pin(pin)
    clock.wall_ms += 2 * HOUR_MS
    assert orders.pins() == [pin] and orders.pin("claim") == pin
    orders.load({f"{PINS}/claim": msgspec.json.encode(pin)})
    assert orders.pins() == [pin], "also when etcd tells of it again"
    clock.wall_ms -= 4 * HOUR_MS
    clock.now_s += HOUR_MS / 1000 - 1
    assert orders.pins() == [pin]
    clock.now_s += 1
    assert orders.pins() == [] and orders.all_pins() == [pin]
    await orders.end_pins("claim")
    assert not orders._ends_s
