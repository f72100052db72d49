"""What heartbeats tell of engines."""

from __future__ import annotations

from kvstrata.rpc.cluster_fields import MAX_ADAPTER_CHARS
from kvstrata.server.cluster.condition import _adapters
from kvstrata.server.processes import AttachedProcess, ProcessTable
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice

LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=256)


def engine(table: ProcessTable, number: int, tenants: frozenset[str] | None = None) -> AttachedProcess:
    return table.attach(
        bytes([number]) * 16,
        group=bytes([number]) * 16,
        role=Role.WORKER,
        layout=LAYOUT,
        engine_slices=1,
        part=Slice(layers=(0, 8), kv_heads=(0, 1), layout="f"),
        tenants=tenants,
        row=number,
        pid=number,
    )


def test_the_newest_adapters_of_all_engines_are_told_once() -> None:
    table = ProcessTable(1)
    one, other, limited = engine(table, 1), engine(table, 2), engine(table, 3, frozenset({"t"}))
    for process, adapter in (
        (one, "a"),
        (one, "b"),
        (other, "c"),
        (other, "b"),
        (one, "x" * MAX_ADAPTER_CHARS + "x"),
    ):
        table.identify(process, RequestIdentity(adapter=adapter))
    table.identify(limited, RequestIdentity(adapter="theirs", tenant="t"))
    told = _adapters(process.group for process in (one, other, limited))
    assert told == ["b", "c", "a"]
