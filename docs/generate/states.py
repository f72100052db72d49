"""docs/states.md: the table of every state machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from docs.generate.source import table, text_of
from kvstrata.client import batches, link, silence
from kvstrata.connectors.vllm import lookup_table
from kvstrata.controller.member import COMMAND, MEMBER, SYNC
from kvstrata.memory.attach import row as attach_row
from kvstrata.memory.attach import server as attach_server
from kvstrata.native.machines import machines
from kvstrata.p2p import leases
from kvstrata.policy import breaker
from kvstrata.rpc import session
from kvstrata.server.admin import prewarm
from kvstrata.server.cluster import link as controller_link
from kvstrata.server.cluster import sync_state
from kvstrata.server.l2 import fetch, tiers
from kvstrata.states import Machine
from kvstrata.storage.host import states as host_states

MACHINES: tuple[Machine[Any, Any], ...] = (
    link.MACHINE,
    silence.MACHINE,
    batches.MACHINE,
    lookup_table.MACHINE,
    attach_server.MACHINE,
    attach_row.MACHINE,
    MEMBER,
    SYNC,
    COMMAND,
    session.MACHINE,
    controller_link.MACHINE,
    sync_state.MACHINE,
    tiers.MACHINE,
    host_states.MACHINE,
    breaker.MACHINE,
    fetch.MACHINE,
    leases.MACHINE,
    prewarm.MACHINE,
)
"""The machines of the Python code, in the order of the page. Those of the native code follow them there."""
Words = Sequence[tuple[str, str]]


def _machine_text(name: str, states: Words, events: Words, after: Mapping[tuple[str, str], str]) -> str:
    """One machine: its table, what its states mean and when its events happen."""
    rows = []
    for state, meaning in states:
        cells = (after.get((state, event), "") for event, _ in events)
        rows.append([f"**{state}**", meaning, *("stays" if cell == state else cell for cell in cells)])
    heads = ["state", "meaning", *(f"`{event}`" for event, _ in events)]
    return f"## {name}\n\n{table(heads, rows)}\n" + "".join(
        f"- `{event}`: {text}\n" for event, text in events
    )


def machine_text(machine: Machine[Any, Any]) -> str:
    """A machine of the Python code."""
    states = [(state.name, text_of(machine.states, state.name)) for state in machine.states]
    events = [(event.name.lower(), text_of(machine.events, event.name)) for event in machine.events]
    after = {
        (state.name, event.name.lower()): follows.name
        for state in machine.states
        for event in machine.events
        if (follows := machine.cell(state, event)) is not None
    }
    return _machine_text(machine.name, states, events, after)


def states() -> str:
    """docs/states.md."""
    head = (
        "# State machines\n\n"
        "Generated from the code by `make docs`. The code executes these tables (`src/kvstrata/states.py`,\n"
        "`ext/core/src/base/machine.h`), so each is the behaviour and not a drawing of it. A row is a state, a\n"
        "column is an event, a cell is the state that follows. An empty cell is an event that cannot happen in that\n"
        "state. Below each table, one line for each event says when it happens.\n"
    )
    texts = [*(machine_text(machine) for machine in MACHINES), *(_machine_text(*it) for it in machines())]
    return "\n".join([head, *texts])
