"""The pages of docs/ that are generated from the code: `python -m tests.harness.pages` writes them all.

What they tell stands in the code: field types and bounds in the structs, meanings in the docstring of a class and in
the text below a field or member.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from msgspec import inspect as kinds

from kvstrata.client.calls import StoreOutcome
from kvstrata.clock import SystemClock
from kvstrata.config.reference import reference as configuration
from kvstrata.controller.app import make_app as make_controller_app
from kvstrata.controller.metrics import CONTROLLER_FAMILIES
from kvstrata.errors import WIRE_ERRORS
from kvstrata.observability.metrics import FAMILIES, STATUS_NUMBERS, Family, gauge_name
from kvstrata.policy.store import Skip, StorePolicy
from kvstrata.process.http import HTTP_STATUS
from kvstrata.rpc import cluster_wire, wire
from kvstrata.server.http.app import AdminEngine, make_app
from kvstrata.types import LayoutIdentity, MissReason, RequestIdentity, Role, Slice

DOCS = Path(__file__).resolve().parents[2] / "docs"
GENERATED = "Generated from the code by `make docs`; to change it, change {}.\n"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in lines)


# --- what the source says about its names -----------------------------------------------------------------------


@functools.cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """By class: the text below each of its fields or members."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found[node.name] = {}
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign):
                target: ast.expr = before.target
            elif isinstance(before, ast.Assign):
                target = before.targets[0]
            else:
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[ast.unparse(target)] = _line(str(after.value.value))
    return found


def _line(text: str | None) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def text_of(owner: type, name: str) -> str:
    """What stands below a field or member in the source."""
    ours = (kind for kind in owner.__mro__ if kind.__module__.startswith("kvstrata."))
    return next(
        filter(None, (_texts(kind.__module__).get(kind.__name__, {}).get(name, "") for kind in ours)), ""
    )


def members(words: type[enum.Enum]) -> str:
    """A table of an enum."""
    numbered = issubclass(words, int)
    rows = []
    for member in words:
        shown = [str(member.value), f"`{member.name.lower()}`"] if numbered else [f"`{member.value}`"]
        rows.append([*shown, text_of(words, member.name)])
    return table(["", *([""] if numbered else []), ""], rows)


# --- types ------------------------------------------------------------------------------------------------------


def type_text(kind: kinds.Type) -> str:
    """A field's type and bounds in words."""
    match kind:
        case kinds.NoneType():
            return "nil"
        case kinds.BoolType():
            return "bool"
        case kinds.IntType():
            return _bounded(kind)
        case kinds.StrType() | kinds.BytesType():
            return _sized("bytes" if isinstance(kind, kinds.BytesType) else "str", kind)
        case kinds.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case kinds.ListType():
            return _sized(f"list of {type_text(kind.item_type)}", kind)
        case kinds.TupleType():
            return f"[{', '.join(map(type_text, kind.item_types))}]"
        case kinds.UnionType():
            return ", or ".join(map(type_text, kind.types))
        case kinds.StructType():
            if kind.array_like:
                return f"[{', '.join(field.name for field in kind.fields)}]"
            return f"map: [{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case kinds.DictType():
            return "map"
        case kinds.AnyType():
            return "any"
    raise TypeError(f"no words for {kind!r}")


def _bounded(kind: kinds.IntType) -> str:
    least = kind.ge
    most = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - 1
    if most is not None and most < wire.MAX_SEQ:
        return f"int, {least or 0:,} to {most:,}"
    return "int" if least is None else f"int from {least:,}"


def _sized(name: str, kind: Any) -> str:
    least, most = kind.min_length, kind.max_length
    if most is None:
        return name
    if least == most:
        return f"{most:,} {name}" if name == "bytes" else f"{name}, exactly {most:,}"
    return f"{name}, at most {most:,}"


def fields(struct: type[msgspec.Struct], without: tuple[str, ...] = ()) -> str:
    """A table of a struct's fields; those with a default may be left out."""
    info = cast(kinds.StructType, kinds.type_info(struct))
    rows = []
    for field in info.fields:
        if field.name in without:
            continue
        name = f"`{field.name}`"
        if not field.required and field.default is not msgspec.NODEFAULT and field.default != b"":
            name += f" = {json.dumps(field.default).replace('null', 'nil')}"
        elif not field.required:
            name += " = empty"
        rows.append([name, type_text(field.type), text_of(struct, field.name)])
    return table(["field", "type", ""], rows) if rows else "No fields.\n"


# --- pages ------------------------------------------------------------------------------------------------------


def wire_codes() -> str:
    """docs/wire-codes.md."""
    parts = [
        "# Messages and codes on the wire\n\n",
        GENERATED.format(
            "`src/kvstrata/rpc/wire.py`, `types.py` and `errors.py`, where the texts here stand below the names"
        ),
        "\nThe rules are in [protocol.md](protocol.md). Every request begins with `op`, `session`, `seq`, every reply "
        "with `op`, `seq`, `epoch`; what follows is listed here, in order. A field with a default may be left out at "
        "the end of a message; fields after the known ones are ignored.\n",
        "\n## Attach\n",
    ]
    for struct in (wire.AttachRequest, wire.AttachReply):
        parts.append(f"\n### {struct.__name__}\n\nA map. {_line(struct.__doc__)}\n\n{fields(struct)}")
    parts.append("\n## Operations\n")
    for request, reply in wire.REPLIES.items():
        op, answer = (str(kind.__struct_config__.tag) for kind in (request, reply))
        parts.append(f"\n### {op}\n\n{_line(request.__doc__)}\n\n{fields(request, ('session', 'seq'))}")
        if answer == op:
            parts.append(f"\nReply `{answer}`: {_line(reply.__doc__)}\n\n{fields(reply, ('seq', 'epoch'))}")
        else:
            parts.append(f"\nReply: [{answer}](#{answer}).\n")
    parts.append("\n## Other replies\n")
    for reply in (wire.Ok, wire.Document, wire.Error):
        more = inspect.cleandoc(reply.__doc__ or "").split("\n\n")
        parts.append(f"\n### {reply.__struct_config__.tag}\n\n{_line(reply.__doc__)}\n\n")
        parts.append("".join(f"{_line(text)}\n\n" for text in more[1:]) + fields(reply, ("seq", "epoch")))
    parts.append("\n## Inside messages\n")
    for struct in (LayoutIdentity, RequestIdentity, Slice, wire.DeviceCopies):
        parts.append(f"\n### {struct.__name__}\n\n{_line(struct.__doc__)}\n\n{fields(struct)}")
    parts.append(
        "\n## Error codes\n\nIn error replies, attach replies and the JSON of the admin HTTP port (with that status)."
        "\n\n"
    )
    rows = [
        [
            f"`{code}`",
            "yes" if error.retryable else "no",
            str(HTTP_STATUS.get(error, 500)),
            _line(error.__doc__),
        ]
        for code, error in WIRE_ERRORS.items()
    ]
    parts.append(table(["code", "retryable", "HTTP", ""], rows))
    for title, words in (
        ("Outcomes of reserve", wire.ReserveOutcome),
        ("Outcomes of commit", wire.CommitOutcome),
        ("Reasons of a miss", MissReason),
        ("Reasons of a put to L2 that was skipped", Skip),
        ("Outcomes of a store, as the Python client tells them", StoreOutcome),
        ("Roles", Role),
        ("Rules of a lookup's group", wire.Rule),
        ("Tiers of a clear", wire.Tier),
    ):
        parts.append(f"\n## {title}\n\n{_line(words.__doc__)}\n\n{members(words)}")
    return "".join(parts)


def cluster_messages() -> str:
    """docs/cluster-messages.md."""
    parts = [
        "# Messages of the cluster\n\n",
        GENERATED.format("`src/kvstrata/rpc/cluster_wire.py`"),
        f"\nProtocol {cluster_wire.CLUSTER_PROTOCOL_VERSION}. ZMQ over TCP, one msgpack array a frame, its name first; "
        "off loopback with CURVE (RFC 26) or an explicit permission to go without. A request goes on with `seq`, its "
        "answer with the same `seq` and the `epoch` of who answers, which changes whenever that process restarts; what "
        "follows is listed here, in order. Each request has one answer: the one named here, or `failure`. Whoever asks "
        "waits a bounded time, and then goes on without. Times are milliseconds left. Chunks are named by *tags*, the "
        "first 8 bytes of a storage key, between instance and controller, and by whole keys between instances.\n",
    ]
    for title, rows in _CLUSTER_SOCKETS.items():
        parts.append(f"\n## {title}\n")
        for request, reply in rows:
            more = inspect.cleandoc(request.__doc__ or "").split("\n\n")
            name = request.__struct_config__.tag
            parts.append(f"\n### {name}\n\n" + "".join(f"{_line(text)}\n\n" for text in more))
            parts.append(
                fields(request, ("seq",) if issubclass(request, cluster_wire.ClusterRequest) else ())
            )
            if reply is not None:
                parts.append(f"\nAnswer `{reply.__struct_config__.tag}`: {_line(reply.__doc__)}\n\n")
                parts.append(fields(reply, ("seq", "epoch")))
    parts.append(f"\n## Failure\n\nInstead of any answer. {_line(cluster_wire.Failure.__doc__)}\n\n")
    parts.append(fields(cluster_wire.Failure, ("seq", "epoch")))
    parts.append("\n## Arrays inside messages\n")
    for struct in (
        cluster_wire.ModelInfo,
        cluster_wire.Owner,
        cluster_wire.Run,
        cluster_wire.Command,
        cluster_wire.CommandResult,
        cluster_wire.Load,
    ):
        parts.append(f"\n### {struct.__name__}\n\n{_line(struct.__doc__)}\n\n{fields(struct)}")
    parts.append("\n### LayoutIdentity\n\nAs in [wire-codes.md](wire-codes.md#layoutidentity).\n")
    for words in (cluster_wire.Change, cluster_wire.CommandKind):
        parts.append(f"\n## {words.__name__}\n\n{_line(words.__doc__)}\n\n{members(words)}")
    return "".join(parts)


_CLUSTER_SOCKETS: dict[str, list[tuple[type[msgspec.Struct], type[msgspec.Struct] | None]]] = {
    "Controller, reply port (ROUTER)": [
        (cluster_wire.Register, cluster_wire.Registered),
        (cluster_wire.Goodbye, cluster_wire.Done),
        (cluster_wire.SyncBegin, cluster_wire.Done),
        (cluster_wire.SyncPart, cluster_wire.Done),
        (cluster_wire.SyncEnd, cluster_wire.Done),
        (cluster_wire.Where, cluster_wire.WhereReply),
    ],
    "Controller, pull port (PULL; no answer)": [(cluster_wire.Events, None)],
    "Controller, heartbeat port (ROUTER)": [
        (cluster_wire.Heartbeat, cluster_wire.Beat),
        (cluster_wire.Nudge, None),
    ],
    "Instance, `p2p.listen` (ROUTER)": [
        (cluster_wire.PeerHello, cluster_wire.PeerWelcome),
        (cluster_wire.PeerLease, cluster_wire.PeerLeased),
        (cluster_wire.PeerRelease, cluster_wire.PeerReleased),
    ],
}


LABELS = {
    "instance_id": "`instance_id` of the configuration",
    "op": "operations of [wire-codes.md](wire-codes.md#operations)",
    "code": "[error codes](wire-codes.md#error-codes)",
    "reason": "[reasons of a miss](wire-codes.md#reasons-of-a-miss); for skipped puts: "
    "[reasons](wire-codes.md#reasons-of-a-put-to-l2-that-was-skipped), or the adapter's own word",
    "outcome": "[outcomes of reserve](wire-codes.md#outcomes-of-reserve); for an adapter: `stored`, `absent` and so "
    "on, with `:reason` where there is one",
    "adapter": "type and index in `l2_adapters`, like `fs-0`",
    "operation": "`exists`, `put`, `load`, `delete`",
}


def _family_rows(families: Mapping[str, Family]) -> list[list[str]]:
    return [
        [
            f"`{name}{'_total' if family.kind == 'counter' else ''}`",
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            family.meaning,
        ]
        for name, family in families.items()
    ]


def metrics() -> str:
    """docs/metrics.md."""
    counted = _family_rows(FAMILIES)
    labels = dict.fromkeys(label for family in FAMILIES.values() for label in family.labels)
    gauges = [[f"`{gauge_name(path)}`", f"`{path}`", text] for path, text in STATUS_NUMBERS.items()]
    return "".join(
        (
            "# Metrics\n\n",
            GENERATED.format("`FAMILIES` and `STATUS_NUMBERS` in `src/kvstrata/observability/metrics.py`"),
            "\n`/metrics` on the admin port, in Prometheus' text format. Counters start at 0 with the server. No label "
            "names tenants, requests or keys, and every label has a closed set of values.\n\n## Counted on the way\n\n",
            table(["metric", "type", "labels", "meaning"], counted),
            "\n### Labels\n\n",
            table(["label", "values"], [[f"`{label}`", LABELS[label]] for label in labels]),
            "\n## Numbers of the status document\n\nGauges without labels, which `kvstrata ctl status` shows at their "
            "paths. ADAPTER stands for an adapter's name, WORD for one of several words; characters other than letters "
            "and digits become `_`. Those of an adapter are there while the server has it.\n\n",
            table(["metric", "path", "meaning"], gauges),
            "\n## Of the controller\n\n`/metrics` on its HTTP port. `instance` is the name of an instance, at most "
            "`max_instances` of them.\n\n",
            table(["metric", "type", "labels", "meaning"], _family_rows(CONTROLLER_FAMILIES)),
            f"\nPolicies of an adapter (`l2_store.adapters.ADAPTER.policy`): {', '.join(map(str, StorePolicy))}.\n",
        )
    )


def openapi() -> str:
    """docs/openapi.json. What only the version of FastAPI or pydantic decides is left out."""
    return _openapi_text(make_app(cast(AdminEngine, None)).openapi())


def _openapi_text(document: dict[str, Any]) -> str:
    return json.dumps(_plain(document), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


@functools.cache
def _controller_document() -> dict[str, Any]:
    cluster = cast(Any, SimpleNamespace(readiness=lambda: (True, ""), epoch=0, clock=SystemClock()))
    return make_controller_app(cluster, cast(Any, None), dict).openapi()


def controller_openapi() -> str:
    """docs/controller-openapi.json."""
    return _openapi_text(_controller_document())


def controller_api() -> str:
    """docs/controller-api.md."""
    document = _plain(_controller_document())
    parts = [
        "# HTTP API of the controller\n\n",
        GENERATED.format("`src/kvstrata/controller/routes/`"),
        "\nOn the port of `--port` (9000); the same as OpenAPI in [controller-openapi.json](controller-openapi.json) "
        "and, from a running controller, at `/docs`. With `--token-file` every request but the probes and the "
        "dashboard's own files carries `Authorization: Bearer TOKEN`. Errors are JSON "
        '`{"code", "message", "field"}` with the codes of [wire-codes.md](wire-codes.md#error-codes) and of '
        "`src/kvstrata/rpc/cluster_wire.py`. `kvstrata ctl cluster` asks for all of it from a shell.\n\n",
    ]
    rows = []
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            answers = [
                f"{status} {_schema_text(answer['content'])}".strip()
                for status, answer in told["responses"].items()
                if status.startswith("2") and answer.get("content")
            ]
            asked = _schema_text(told["requestBody"]["content"]) if "requestBody" in told else ""
            queries = [f"`{one['name']}`" for one in told.get("parameters", []) if one["in"] == "query"]
            text = " ".join(told.get("description", "").split())
            rows.append([f"`{method.upper()} {path}`", asked or ", ".join(queries), " ".join(answers), text])
    parts.append(table(["request", "body or query", "answer", ""], rows))
    schemas = document["components"]["schemas"]
    for name in sorted(schemas):
        if name in ("HTTPValidationError", "ValidationError"):
            continue
        schema = schemas[name]
        parts.append(f"\n## {name}\n\n{' '.join(schema.get('description', '').split())}\n\n")
        required = schema.get("required", [])
        fields = [
            [
                f"`{field}`"
                + ("" if field in required or "default" not in told else f" = {json.dumps(told['default'])}"),
                _kind_text(told),
                told.get("description", ""),
            ]
            for field, told in schema.get("properties", {}).items()
        ]
        parts.append(table(["field", "type", ""], fields))
    return "".join(parts)


def _schema_text(content: dict[str, Any]) -> str:
    return ", ".join(filter(None, (_kind_text(one.get("schema", {})) for one in content.values())))


def _kind_text(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return ", or ".join(_kind_text(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind_text(schema.get('items', {}))}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"map of {_kind_text(inner)}" if isinstance(inner, dict) else "map"
    bounds = [
        f"{sign} {schema[word]}"
        for word, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if word in schema
    ]
    return ", ".join([str(schema.get("type", "")), *bounds]).strip(", ")


def _plain(value: Any, inside: str = "") -> Any:
    if isinstance(value, dict):
        left_out = () if inside in ("properties", "info") else ("title",)
        return {
            key: _plain(inner, key)
            for key, inner in value.items()
            if key not in left_out and not (key == "additionalProperties" and inner is True)
        }
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


PAGES: dict[str, Callable[[], str]] = {
    "cluster-messages.md": cluster_messages,
    "configuration.md": configuration,
    "controller-api.md": controller_api,
    "controller-openapi.json": controller_openapi,
    "metrics.md": metrics,
    "openapi.json": openapi,
    "wire-codes.md": wire_codes,
}
"""By file name below docs/."""


def stale(folder: Path = DOCS) -> Iterator[str]:
    """Names of pages that differ from what the code says."""
    for name, make in PAGES.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != make():
            yield name


def main() -> None:
    """Write every page whose text has changed."""
    for name in list(stale()):
        fresh = DOCS / f".{name}.new"
        fresh.write_text(PAGES[name](), encoding="utf-8")
        os.replace(fresh, DOCS / name)
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
