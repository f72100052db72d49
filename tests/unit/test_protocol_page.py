"""docs/protocol.md says what the code does: operations with their fields, errors, reasons, outcomes, limits."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from kvstrata.errors import WIRE_ERRORS, ConfigError, SegmentError, StorageError
from kvstrata.rpc import wire
from kvstrata.rpc.session import Limits
from kvstrata.types import LayoutIdentity, MissReason, RequestIdentity, Role

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
ROWS = {
    cells[0].strip(" `"): [cell.strip() for cell in cells[1:]]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for cells in [line.strip().strip("|").split("|")]
}


def words(cell: str) -> list[str]:
    """Field names of a cell in order: what stands before `=`, an opening bracket or a blank."""
    inner = re.sub(r"[\[({].*?[\])}]+", "", cell)
    return [re.split(r"[ =]", part.strip())[0] for part in inner.split(",") if part.strip()]


@pytest.mark.parametrize("request_type", typing.get_args(wire.AnyRequest), ids=lambda kind: kind.__name__)
def test_each_operation_is_listed_with_its_fields_in_order(request_type: type[wire.Request]) -> None:
    op = str(request_type.__struct_config__.tag)
    fields = [name for name in request_type.__struct_fields__ if name not in ("session", "seq")]
    assert words(ROWS[op][0]) == fields


@pytest.mark.parametrize("reply_type", typing.get_args(wire.AnyReply), ids=lambda kind: kind.__name__)
def test_each_reply_is_listed_with_its_fields_in_order(reply_type: type[wire.Reply]) -> None:
    tag = str(reply_type.__struct_config__.tag)
    fields = [name for name in reply_type.__struct_fields__ if name not in ("seq", "epoch")]
    if tag == "error":
        assert f'["error", seq, epoch, {", ".join(fields)}]' in PAGE
    elif tag in ("ok", "document"):
        assert any(row[1].startswith(f"`{tag}`") for row in ROWS.values() if len(row) > 1)
    else:
        shown = ROWS[tag][1].removeprefix(f"`{tag}`: ")
        assert words(shown) == fields


@pytest.mark.parametrize("struct", [wire.AttachRequest, wire.AttachReply, LayoutIdentity, RequestIdentity])
def test_the_attach_messages_are_listed_with_all_fields(struct: type) -> None:
    for name in struct.__struct_fields__:  # type: ignore[attr-defined]
        assert re.search(rf"\b{name}\b", PAGE), name


def test_every_error_a_client_can_get_is_listed() -> None:
    never_sent = {ConfigError.code, SegmentError.code, StorageError.code}
    for code in set(WIRE_ERRORS) - never_sent:
        assert code in ROWS, code


def test_roles_reasons_and_outcomes_are_listed() -> None:
    for word in (*Role, *MissReason, *wire.Tier, *wire.Rule):
        assert f"`{word}`" in PAGE, word
    listed = " ".join(PAGE.split())
    for outcome in (*wire.ReserveOutcome, *wire.CommitOutcome):
        assert f"{outcome.value} {outcome.name.lower().replace('_', ' ')}" in listed, outcome


def test_limits_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"frame of {wire.MAX_MESSAGE_BYTES >> 20} MiB" in text
    assert f"{wire.MAX_CHUNKS:,} chunks in a lookup" in text
    assert f"{wire.MAX_RESERVE_CHUNKS:,} chunks in a reserve" in text
    assert f"{wire.MAX_RELEASES:,} leases in a release" in text
    assert f"{wire.MAX_LIVE:,} lookups in a ping" in text
    assert f"deadlines of {wire.MAX_DEADLINE_MS // 1000} s" in text
    assert f"at most {wire.MAX_RETRIEVE_BYTES >> 20} MiB" in text
    limits = Limits()
    assert f"the last {limits.max_outcomes:,} outcomes" in text
    assert f"about {limits.max_reply_bytes >> 20} MiB" in text
    assert f"At most {limits.max_running:,} requests of a session run" in text
    assert f"at most {limits.max_effects:,} leases and reservations" in text
    assert f"Version {wire.PROTOCOL_VERSION}." in text
