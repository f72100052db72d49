"""docs/protocol.md and the generated pages say what the code does: limits, links, every code with its meaning."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest

from kvstrata.client.calls import StoreOutcome
from kvstrata.errors import WIRE_ERRORS
from kvstrata.observability.metrics import FAMILIES, STATUS_NUMBERS, gauge_name, meaning_of
from kvstrata.policy.store import Skip
from kvstrata.rpc import wire
from kvstrata.rpc.session import Limits
from kvstrata.types import MissReason, Role
from tests.harness import pages

PAGE = (pages.DOCS / "protocol.md").read_text()


def test_every_generated_page_is_current() -> None:
    assert not list(pages.stale()), "run `make docs`"


def test_a_page_that_the_code_does_not_say_is_stale(tmp_path: Path) -> None:
    for name, make in pages.PAGES.items():
        (tmp_path / name).write_text(make())
    assert not list(pages.stale(tmp_path))
    (tmp_path / "metrics.md").unlink()
    (tmp_path / "wire-codes.md").write_text((tmp_path / "wire-codes.md").read_text() + "\n")
    assert list(pages.stale(tmp_path)) == ["metrics.md", "wire-codes.md"]


def test_every_message_is_on_the_page_with_its_fields_in_order() -> None:
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", pages.wire_codes() + "##", re.M | re.S))
    for message in (*typing.get_args(wire.AnyRequest), wire.Ok, wire.Document, wire.Error):
        fields = [name for name in message.__struct_fields__ if name not in ("session", "seq", "epoch")]
        listed = re.findall(r"^\| `(\w+)`", sections[message.__struct_config__.tag], re.M)
        assert listed[: len(fields)] == fields
    assert set(wire.REPLIES) == set(typing.get_args(wire.AnyRequest))
    assert {*wire.REPLIES.values(), wire.Error} == set(typing.get_args(wire.AnyReply))


@pytest.mark.parametrize(
    "words",
    [wire.ReserveOutcome, wire.CommitOutcome, MissReason, Skip, StoreOutcome, Role, wire.Tier, wire.Rule],
)
def test_every_word_on_the_wire_is_listed_with_its_meaning(words: typing.Any) -> None:
    for word in words:
        assert pages.text_of(words, word.name), f"{word.name}: write its meaning below it"
        assert word.name.lower() in pages.wire_codes()


def test_every_error_code_is_listed_with_its_meaning() -> None:
    page = pages.wire_codes()
    for code, error in WIRE_ERRORS.items():
        row = re.search(rf"^\| `{code}` \| (yes|no) \| \d+ \| (.+) \|$", page, re.M)
        assert row and row[1] == ("yes" if error.retryable else "no") and len(row[2]) > 20, code


def test_every_metric_and_label_has_a_meaning() -> None:
    page = pages.metrics()
    for name, family in FAMILIES.items():
        assert f"| `{name}{'_total' * (family.kind == 'counter')}` | {family.kind} |" in page
        assert family.meaning.endswith(".")
        assert set(family.labels) <= set(pages.LABELS)
    for path in STATUS_NUMBERS:
        assert f"| `{gauge_name(path)}` | `{path}` | {meaning_of(path)} |" in page


def test_the_admin_api_is_described_with_its_errors_and_its_token() -> None:
    api = json.loads(pages.openapi())
    for path, operations in api["paths"].items():
        for operation in operations.values():
            assert {"4XX", "5XX"} <= set(operation["responses"]) and "422" not in operation["responses"]
            assert operation["description"], path
            assert ("security" in operation) == (path not in ("/healthz", "/readyz"))
    assert set(api["components"]["schemas"]["ErrorBody"]["properties"]) == {"code", "message", "field"}


@pytest.mark.parametrize("page", sorted(pages.DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([\w./-]+?)(#([\w-]*))?\)", page.read_text()):
        there = page.parent / target
        assert there.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{target}#{anchor}"


def test_codes_are_listed_in_one_place_only() -> None:
    for word in (
        WIRE_ERRORS["layout_refused"].code,
        MissReason.FORGOTTEN,
        "chain exceeds pool",
        "entries_full",
    ):
        assert str(word) not in PAGE


def test_limits_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"frame of {wire.MAX_MESSAGE_BYTES >> 20} MiB" in text
    assert f"{wire.MAX_CHUNKS:,} chunks in a lookup" in text
    assert f"{wire.MAX_RESERVE_CHUNKS:,} chunks in a reserve" in text
    assert f"{wire.MAX_RELEASES:,} leases in a release" in text
    assert f"{wire.MAX_LIVE:,} lookups in a ping" in text
    assert f"deadlines of {wire.MAX_DEADLINE_MS // 1000} s" in text
    limits = Limits()
    assert f"the last {limits.max_outcomes:,} outcomes" in text
    assert f"about {limits.max_reply_bytes >> 20} MiB" in text
    assert f"At most {limits.max_running:,} requests of a session run" in text
    assert f"at most {limits.max_effects:,} leases and reservations" in text
    assert f"Version {wire.PROTOCOL_VERSION}." in text
