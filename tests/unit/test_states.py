"""Every machine of docs/states.md, cell by cell: what leads where, what cannot happen, what the words mean."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from docs.generate.source import DOCS, text_of
from docs.generate.states import MACHINES, machine_text
from kvstrata.native import pool
from kvstrata.states import Machine

CELLS = [
    pytest.param(machine, state, event, id=f"{machine.name}: {state.name}, {event.name}")
    for machine in MACHINES
    for state in machine.states
    for event in machine.events
]
by_name = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


@pytest.mark.parametrize(("machine", "state", "event"), CELLS)
def test_every_cell_leads_to_a_state_or_is_a_mistake_that_names_it(
    machine: Machine[Any, Any], state: enum.Enum, event: enum.Enum
) -> None:
    after = machine.cell(state, event)
    if after is None:
        with pytest.raises(AssertionError, match=f"{event.name.lower()} cannot happen in {state.name}"):
            machine.after(state, event)
    else:
        assert machine.after(state, event) is after and after in machine.states


@by_name
def test_every_state_is_reached_and_every_event_happens(machine: Machine[Any, Any]) -> None:
    reached, grown = {machine.first}, True
    while grown:
        after = {machine.cell(state, event) for state in reached for event in machine.events} - {None}
        grown = not after <= reached
        reached |= after
    assert reached == set(machine.states)
    for event in machine.events:
        assert any(machine.cell(state, event) for state in machine.states), event


@by_name
def test_every_state_and_event_has_a_meaning_on_the_page(machine: Machine[Any, Any]) -> None:
    page = (DOCS / "states.md").read_text(encoding="utf-8")
    assert machine_text(machine) in page, "run `make docs`"
    for words in (machine.states, machine.events):
        for word in words:
            assert text_of(words, word.name), f"{word.name}: write its meaning below it"


@pytest.mark.parametrize("machine", pool.machines(), ids=lambda machine: machine.name)
def test_tables_of_the_native_pool_are_on_the_page(machine: pool.MachineTable) -> None:
    """Each cell of theirs is walked by ext/core/tests/pool/states_test.cpp."""
    page = (DOCS / "states.md").read_text(encoding="utf-8")
    _, _, text = page.partition(f"## {machine.name}\n")
    text, _, _ = text.partition("\n#")
    for state, meaning in machine.states:
        row = next(line for line in text.splitlines() if line.startswith(f"| **{state}** | {meaning} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")[2:]]
        after = (machine.after.get((state, event), "") for event, _ in machine.events)
        assert cells == ["stays" if follows == state else follows for follows in after], state
    for event, meaning in machine.events:
        assert f"- `{event}`: {meaning}\n" in text, event
