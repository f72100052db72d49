"""What the picker answers to Envoy's messages, in any order and to any end."""

from __future__ import annotations

import contextlib
import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.choosing import Choosing
from kvstrata.gateway.door import Door
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.picker import messages
from kvstrata.gateway.picker.exchange import Exchange, Held, OutOfTurn
from kvstrata.gateway.reading import Reader
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.routing.policies import POLICIES
from kvstrata.process.http_gate import Access
from tests.harness.ext_proc import headers, part, trailers

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 5_000}]}).encode()


class Scene:
    """Two engines, `10.0.0.1:8000` and `10.0.0.2:8000`, and what exchanges share."""

    def __init__(self) -> None:
        settings = GatewaySettings(policy="ttft")
        now_s = iter(range(1_000_000)).__next__
        self.fleet = Fleet(now_s)
        for engine in self.fleet.set_places(
            Place(name, Address(f"10.0.0.{number}", 8_000, False)) for number, name in ((1, "a"), (2, "b"))
        ):
            self.fleet.up(engine, {"m": {"id": "m"}})
        self.meters = Meters({}, now_s)
        residency, policy = Residency(now_s), POLICIES[settings.policy]()
        self.choosing = Choosing(policy, self.fleet, residency, self.meters, now_s)
        door = Door(Access(settings.http, "t" * 32), now_s, loopback=True)
        reader = Reader(settings, self.fleet)
        self.suspected: list[str] = []
        forwarder: Any = SimpleNamespace(suspect=lambda one: self.suspected.append(one.name))
        tokens: Any = self
        unused: Any = None
        self.parts = Parts(
            settings, now_s, door, self.fleet, self.meters, reader, residency, tokens, self.choosing, unused, unused,
            forwarder, None,
        )  # fmt: skip
        self.compared: list[tuple[str, str, int, int]] = []
        self.ids: array[int] | None = None
        """Of each prompt of text."""
        self.held = Held()

    def exchange(self) -> Exchange:
        """A further request."""
        return Exchange(self.parts, self.held)

    def reported(self, model: str, engine: str, ours: int, theirs: int) -> None:
        """As Tokens does."""
        self.compared.append((model, engine, ours, theirs))

    def take(self, exchange: Exchange, message: Any) -> list[Any]:
        """Give a message to an exchange, as the server does."""
        replies = exchange.take(message)
        if exchange.question is not None:
            exchange.has_ids(self.ids)
        if exchange.wanted is not None:
            replies += exchange.told(exchange.wanted)
        return replies

    def assert_idle(self) -> None:
        """Nothing is held of any request."""
        assert (self.held.exchanges, self.held.body_bytes) == (0, 0)
        for engine in self.fleet:
            assert (engine.in_flight, engine.load.waiting, engine.load.prefill_tokens) == (0, 0, 0)


MESSAGES = st.sampled_from(
    [
        headers(),
        headers(end=True),
        headers(_path="/sleep"),
        part("request_body", BODY[:100]),
        part("request_body", BODY, end=True),
        part("request_body", b"", end=True),
        trailers("request_trailers"),
        headers("response_headers", _status="200"),
        headers("response_headers", _status="503"),
        headers("response_headers", end=True, _status="204"),
        part("response_body", b"data: a\n\n"),
        part("response_body", b"", end=True),
        trailers("response_trailers"),
        pb.ProcessingRequest(),
    ]
)


LEGAL = st.tuples(
    st.just(headers()),
    st.just(part("request_body", BODY[:100])),
    st.sampled_from([part("request_body", BODY[100:], end=True), trailers("request_trailers")]),
    st.sampled_from([headers("response_headers", _status=status) for status in ("200", "404", "503")]),
    st.just(part("response_body", b"data: a\n\n")),
    st.sampled_from([part("response_body", b"", end=True), trailers("response_trailers")]),
)


@given(LEGAL, st.integers(0, 6), st.lists(MESSAGES, max_size=3))
def test_everything_is_given_back_wherever_a_stream_ends(legal, cut, more):
    scene = Scene()
    exchange = scene.exchange()
    with contextlib.suppress(OutOfTurn):
        for message in (*legal[:cut], *more):
            scene.take(exchange, message)
    exchange.end()
    exchange.end()
    scene.assert_idle()
    assert sum(sum(one.outcomes.values()) for one in scene.meters.series.values()) == 1


def test_the_body_goes_on_behind_the_choice_in_parts_that_every_proxy_takes() -> None:
    scene = Scene()
    exchange = scene.exchange()
    body = BODY + b" " * 150_000
    assert scene.take(exchange, headers()) == []
    assert scene.take(exchange, part("request_body", body[:70_000])) == []
    assert scene.held.body_bytes == 70_000
    first, *rest = scene.take(exchange, part("request_body", body[70_000:], end=True))
    assert scene.held.body_bytes == 0
    options = first.request_headers.response.header_mutation.set_headers
    told = {one.header.key: one.header.raw_value.decode() for one in options}[messages.ENDPOINT]
    assert told in ("10.0.0.1:8000,10.0.0.2:8000", "10.0.0.2:8000,10.0.0.1:8000"), "the best, then the next"
    assert first.dynamic_metadata["envoy.lb"][messages.ENDPOINT] == told
    pieces = [one.request_body.response.body_mutation.streamed_response for one in rest]
    assert b"".join(one.body for one in pieces) == body
    assert [one.end_of_stream for one in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(one.body) for one in pieces) <= messages.MAX_PART_BYTES
    assert [one.in_flight for one in scene.fleet if one.place.address.host in told[:8]] == [1]
    exchange.end()
    scene.assert_idle()


def test_only_engines_of_the_subset_are_chosen() -> None:
    for subset, allowed in (
        (["10.0.0.2:8000"], "10.0.0.2:8000"),
        (["10.0.0.2:8000, 10.0.0.9:1"], "10.0.0.2:8000"),
        (["10.0.0.9:8000"], ""),
        ([], ""),
    ):
        for _ in range(4):
            scene = Scene()
            exchange = scene.exchange()
            head = headers()
            fields = head.metadata_context.filter_metadata[messages.SUBSET_NAMESPACE]
            fields.get_or_create_list(messages.SUBSET).extend(subset)
            scene.take(exchange, head)
            reply = scene.take(exchange, part("request_body", BODY, end=True))[0]
            if allowed:
                assert reply.dynamic_metadata["envoy.lb"][messages.ENDPOINT] == allowed
            else:
                assert reply.immediate_response.status.code == 503
                assert json.loads(reply.immediate_response.body)["error"]["code"] == "no_engine"
            exchange.end()
            scene.assert_idle()


def test_another_engine_that_has_answered_gets_the_credit() -> None:
    scene = Scene()
    exchange = scene.exchange()
    scene.take(exchange, headers())
    reply = scene.take(exchange, part("request_body", BODY, end=True))[0]
    told = reply.dynamic_metadata["envoy.lb"][messages.ENDPOINT]
    [other] = [one for one in scene.fleet if one.place.address.host not in told[:8]]
    head = headers("response_headers", _status="200")
    served = f"{other.place.address.host}:8000"
    head.metadata_context.filter_metadata["envoy.lb"].update({messages.SERVED: served})
    scene.take(exchange, head)
    scene.take(exchange, part("response_body", b"data: a\n\n"))
    assert {one.name: one.in_flight for one in scene.fleet} == {"a": 0, "b": 0} | {other.name: 1}
    scene.take(exchange, part("response_body", b"", end=True))
    scene.assert_idle()
    assert [labels[2] for labels in scene.meters.series] == [other.name]


def test_an_engine_that_envoy_cannot_reach_is_probed_and_taken_for_cold() -> None:
    scene = Scene()
    exchange = scene.exchange()
    scene.take(exchange, headers())
    scene.take(exchange, part("request_body", BODY, end=True))
    scene.take(exchange, headers("response_headers", _status="503"))
    scene.take(exchange, part("response_body", b"no", end=True))
    assert len(scene.suspected) == 1 and len(scene.choosing.prefixes) == 0
    scene.assert_idle()


@pytest.mark.parametrize("trails", [False, True])
def test_a_prompt_whose_ids_are_known_is_chosen_by_them_and_compared(trails: bool) -> None:
    scene = Scene()
    scene.ids = array("I", range(77))
    exchange = scene.exchange()
    scene.take(exchange, headers())
    if trails:
        assert scene.take(exchange, part("request_body", BODY)) == []
        replies = scene.take(exchange, trailers("request_trailers"))
        assert [one.WhichOneof("response") for one in replies] == [
            "request_headers",
            "request_body",
            "request_trailers",
        ]
        assert not replies[1].request_body.response.body_mutation.streamed_response.end_of_stream
    else:
        scene.take(exchange, part("request_body", BODY, end=True))
    [kept] = scene.choosing.decisions.page(1)
    assert kept["tokens"] == 77
    scene.take(exchange, headers("response_headers", _status="200"))
    scene.take(exchange, part("response_body", b'{"usage": {"prompt_tokens": 78}}', end=True))
    [(model, engine, ours, theirs)] = scene.compared
    assert (model, ours, theirs) == ("m", 77, 78) and engine in ("a", "b")
    scene.assert_idle()


def test_a_stream_that_ends_while_ids_are_asked_for_gives_everything_back() -> None:
    scene = Scene()
    exchange = scene.exchange()
    exchange.take(headers())
    assert exchange.take(part("request_body", BODY, end=True)) == []
    assert exchange.question is not None and scene.held.body_bytes == len(BODY)
    with pytest.raises(OutOfTurn):
        exchange.take(part("request_body", b"", end=True))
    exchange.end()
    scene.assert_idle()


def test_engines_that_would_not_understand_the_same_headers_are_not_named() -> None:
    scene = Scene()
    a, b = scene.fleet
    scene.fleet.set_ranks(a, 2)

    def named() -> list[str]:
        exchange = scene.exchange()
        scene.take(exchange, headers())
        reply = scene.take(exchange, part("request_body", BODY, end=True))[0]
        exchange.end()
        return str(reply.dynamic_metadata["envoy.lb"][messages.ENDPOINT]).split(",")

    # To the engine without ranks a rank means nothing, and the other one chooses by itself without the header.
    for _ in range(8):
        places = named()
        assert places in (["10.0.0.1:8000"], ["10.0.0.2:8000", "10.0.0.1:8000"]), places
    scene.fleet.set_ranks(b, 2)
    assert {len(named()) for _ in range(8)} == {2}
    b.place = b.place._replace(api_key="of-b")
    scene.fleet.up(b, b.models)
    assert {len(named()) for _ in range(8)} == {1}, "an engine's key goes to no other"
    scene.assert_idle()
