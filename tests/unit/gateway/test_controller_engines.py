"""Which of the engines that controllers name a gateway takes, and when one leaves."""

from __future__ import annotations

import pytest

from kvstrata.errors import ConfigError
from kvstrata.gateway.controller_engines import GONE_S, Allowed, ControllerEngines
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Place

FIELD = "engines_from.controllers.allowed"


def test_hosts_are_allowed_by_network_and_by_name() -> None:
    for entries, inside, outside in (
        (["10.0.0.0/8"], ["10.0.0.1", "10.255.1.2"], ["11.0.0.1", "a.example", "::1"]),
        (["192.168.1.7"], ["192.168.1.7"], ["192.168.1.8"]),
        (["fd00::/8"], ["fd00::1"], ["10.0.0.1", "fe80::1"]),
        (
            ["*.Example.org"],
            ["a.example.org", "A.EXAMPLE.ORG"],
            ["example.org", "a.example.org.evil", "10.0.0.1"],
        ),
        (["gpu1"], ["gpu1"], ["gpu11", "gpu"]),
    ):
        allowed = Allowed(entries, FIELD)
        assert all(host in allowed for host in inside)
        assert not any(host in allowed for host in outside)


def test_what_is_neither_network_nor_name_is_refused_by_its_field() -> None:
    for entry in ("10.0.0.0/33", "10.0.0.1/8", "1.2.3", "a/8", "10.0.0.256"):
        with pytest.raises(ConfigError, match=r"allowed\[1\]: '") as refused:
            Allowed(["10.0.0.0/8", entry], FIELD)
        assert refused.value.field == f"{FIELD}[1]"


class Scene:
    """Engines that controllers name, what the gateway was told, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[list[str]] = []
        self.serve: set[str] = set()
        self.taken: set[Address] = set()
        self.engines = ControllerEngines(
            Allowed(["10.0.0.0/8"], FIELD),
            "key",
            self.tell,
            self.serve.__contains__,
            lambda: self.taken,
            lambda: self.now_s,
        )

    def tell(self, places: list[Place]) -> None:
        assert all(place.api_key == "key" for place in places)
        self.told.append([place.name for place in places])

    def at(self, now_s: float, *urls: str) -> list[str]:
        """Controllers name these; returns what the gateway has been told last."""
        self.now_s = now_s
        self.engines.named(urls)
        return self.told[-1] if self.told else []


A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def test_named_engines_are_told_once_and_others_never() -> None:
    scene = Scene()
    assert scene.at(0, B, A, "http://11.0.0.1:8000", "http://10.0.0.3:99999") == [
        "10.0.0.1:8000",
        "10.0.0.2:8000",
    ]
    scene.at(1, A, B)
    assert len(scene.told) == 1


def test_an_engine_that_serves_stays_a_while_though_nobody_names_it() -> None:
    scene = Scene()
    scene.serve.add("10.0.0.1:8000")
    scene.at(0, A, B)
    assert scene.at(1) == ["10.0.0.1:8000"], "the other does not serve"
    assert scene.at(GONE_S - 1) == ["10.0.0.1:8000"]
    assert scene.at(GONE_S) == []
    assert scene.at(GONE_S + 1, A) == ["10.0.0.1:8000"]
    assert scene.at(2 * GONE_S) == ["10.0.0.1:8000"], "the time counts from when it was named last"


def test_engines_of_the_settings_are_left_to_them() -> None:
    scene = Scene()
    scene.taken.add(Address("10.0.0.1", 8000, False))
    assert scene.at(0, A, B) == ["10.0.0.2:8000"]
