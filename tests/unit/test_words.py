"""The words of docs/architecture.md are the words of the code: what it says not to say is in no name of src."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvstrata"

USERS = {
    "observability/logging.py: info": "as in the logging module",
    "storage/media/mooncake/sdk.py: ask_master": "Mooncake's own word for its metadata server",
}
"""Names that stay, and why."""

KNOWN: dict[str, str] = {}
"""Names that are still to be changed, with the word; this may only become shorter."""


class Rule(NamedTuple):
    """A word that is not said, and where."""

    word: str
    rooms: frozenset[str]
    """Empty: everywhere."""

    def breaks(self, room: str, name: str) -> bool:
        """Whether a name says it."""
        if self.rooms and room not in self.rooms:
            return False
        return name == self.word if self.word[0].isupper() else self.word in parts(name)


def parts(name: str) -> list[str]:
    """The words of a name in either spelling: `TierControl`, `tier_control`, `P2PTier`."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def rules() -> list[Rule]:
    """What the glossary's last column says in code."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| term | meaning | do not say |\n")[1].split("\n\n")[0]
    found = []
    for row in table.splitlines()[1:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        for word, rooms in re.findall(r"`(\w+)`(?: \(in ([\w, ]+)\))?", cells[2]):
            found.append(Rule(word, frozenset(rooms.split(", ")) if rooms else frozenset()))
    return found


def names() -> Iterator[tuple[str, str, str]]:
    """Room, place and name of every module, class and function."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        room = place.split("/")[0].removesuffix(".py")
        for folder in path.relative_to(PACKAGE).parts[:-1]:
            yield room, place, folder
        yield room, place, path.stem
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield room, place, node.name


def said() -> dict[str, str]:
    """Names that break a rule: `place: name` → the word."""
    table = rules()
    return {
        f"{place}: {name}": rule.word
        for room, place, name in names()
        for rule in table
        if rule.breaks(room, name)
    }


def test_no_name_says_what_the_glossary_says_not_to_say() -> None:
    found = said()
    assert {name: word for name, word in found.items() if name not in USERS} == KNOWN
    assert set(USERS) <= set(found), "a name that is gone needs no reason to stay"


@pytest.mark.parametrize(
    ("room", "name", "broken"),
    [
        ("storage", "BackendHelper", {"backend", "helper"}),
        ("memory", "peer_of", {"peer"}),
        ("p2p", "PeerTier", set()),
        ("server", "Engine", {"Engine"}),
        ("client", "BlockCopyEngine", set()),
        ("server", "Member", {"Member"}),
        ("controller", "Member", set()),
        ("storage", "ArenaImpl", {"arena", "impl"}),
    ],
)
def test_the_rules_are_those_of_the_page(room: str, name: str, broken: set[str]) -> None:
    assert {rule.word for rule in rules() if rule.breaks(room, name)} == broken


def test_every_term_stands_once() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| term | meaning | do not say |\n")[1].split("\n\n")[0]
    terms = [term for row in table.splitlines()[1:] for term in row.split("|")[1].strip().split(", ")]
    assert len(terms) == len(set(terms)) > 30
