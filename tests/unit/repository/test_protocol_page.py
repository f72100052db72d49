"""docs/protocol.md and the generated pages say what the code does: limits, every code with its meaning."""

from __future__ import annotations

import json
import re
import typing

from docs.generate.http_api import openapi
from docs.generate.messages import wire_codes
from docs.generate.pages import stale
from docs.generate.source import DOCS
from kvstrata.process.http_gate import PROBES
from kvstrata.rpc import wire
from kvstrata.rpc.frame import (
    MAX_BINARY_BYTES,
    MAX_DEPTH,
    MAX_TEXT_BYTES,
    MAX_UNPROVEN_BYTES,
    MAX_VALUES,
    PROOF_PREFIX,
)
from kvstrata.rpc.session import MAX_SEQ_STEP, Limits

PAGE = (DOCS / "protocol.md").read_text()


def test_every_generated_page_is_current() -> None:
    assert not list(stale()), "run `make docs`"


def test_every_message_is_on_the_page_with_its_fields_in_order() -> None:
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", wire_codes() + "##", re.M | re.S))
    for message in (*typing.get_args(wire.AnyRequest), wire.Ok, wire.Document, wire.Error):
        fields = [name for name in message.__struct_fields__ if name not in ("session", "seq", "epoch")]
        listed = re.findall(r"^\| `(\w+)`", sections[message.__struct_config__.tag], re.M)
        assert listed[: len(fields)] == fields
    assert set(wire.REPLIES) == set(typing.get_args(wire.AnyRequest))
    assert {*wire.REPLIES.values(), wire.Error} == set(typing.get_args(wire.AnyReply))


def test_the_admin_api_is_described_with_its_errors_and_its_token() -> None:
    api = json.loads(openapi())
    for path, operations in api["paths"].items():
        for operation in operations.values():
            assert {"4XX", "5XX"} <= set(operation["responses"]) and "422" not in operation["responses"]
            assert operation["description"], path
            assert ("security" in operation) == (path not in PROBES)
    assert set(api["components"]["schemas"]["ErrorBody"]["properties"]) == {"code", "message", "field"}


def test_limits_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"frame of {wire.MAX_MESSAGE_BYTES >> 20} MiB" in text
    assert f"a frame of {MAX_UNPROVEN_BYTES >> 10} KiB without a session" in text
    assert (
        f"one message {MAX_VALUES:,} values, nested {MAX_DEPTH} deep, {MAX_TEXT_BYTES >> 10} KiB in a text"
        in text
    )
    assert f"{MAX_BINARY_BYTES >> 20} MiB in a byte string" in text
    assert (
        f"bytes `{PROOF_PREFIX.hex(' ').upper()}` and the session's {wire.SECRET_BYTES}-byte secret" in text
    )
    assert f"at most {MAX_SEQ_STEP:,} above the highest" in text
    assert f"{wire.MAX_CHUNKS:,} chunks in a lookup" in text
    assert f"{wire.MAX_RESERVE_CHUNKS:,} chunks in a reserve" in text
    assert f"{wire.MAX_RELEASES:,} leases in a release" in text
    assert f"{wire.MAX_LIVE:,} lookups and {wire.MAX_MISSES} misses in a ping" in text
    assert f"deadlines of {wire.MAX_DEADLINE_MS // 1000} s" in text
    limits = Limits()
    assert f"the last {limits.max_outcomes:,} outcomes" in text
    assert f"about {limits.max_reply_bytes >> 20} MiB" in text
    assert f"At most {limits.max_running:,} requests of a session run" in text
    assert f"at most {limits.max_effects:,} leases and reservations" in text
    assert f"Version {wire.PROTOCOL_VERSION}." in text
