"""Every machine of docs/states.md: each state is reached, each event happens, and the page tells what they mean."""

from __future__ import annotations

from typing import Any

from docs.generate.source import DOCS, text_of
from docs.generate.states import MACHINES, machine_text
from kvstrata.native import pool
from kvstrata.states import Machine


def check_reached(machine: Machine[Any, Any]) -> None:
    reached, grown = {machine.first}, True
    while grown:
        after = {machine.cell(state, event) for state in reached for event in machine.events} - {None}
        grown = not after <= reached
        reached |= after
    assert reached == set(machine.states)
    for event in machine.events:
        assert any(machine.cell(state, event) for state in machine.states), event


def check_page(machine: Machine[Any, Any]) -> None:
    page = (DOCS / "states.md").read_text(encoding="utf-8")
    assert machine_text(machine) in page, "run `make docs`"
    for words in (machine.states, machine.events):
        for word in words:
            assert text_of(words, word.name), f"{word.name}: write its meaning below it"


def test_every_state_is_reached_and_every_event_happens_as_the_page_says() -> None:
    for machine in MACHINES:
        check_reached(machine)
        check_page(machine)


def test_tables_of_the_native_pool_are_on_the_page() -> None:
    """Each cell of theirs is walked by ext/core/tests/pool/states_test.cpp."""
    page = (DOCS / "states.md").read_text(encoding="utf-8")
    for machine in pool.machines():
        _, _, text = page.partition(f"## {machine.name}\n")
        text, _, _ = text.partition("\n#")
        for state, meaning in machine.states:
            row = next(line for line in text.splitlines() if line.startswith(f"| **{state}** | {meaning} |"))
            cells = [cell.strip() for cell in row.strip("|").split("|")[2:]]
            after = (machine.after.get((state, event), "") for event, _ in machine.events)
            assert cells == ["stays" if follows == state else follows for follows in after], state
        for event, meaning in machine.events:
            assert f"- `{event}`: {meaning}\n" in text, event
