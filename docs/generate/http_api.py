"""docs/openapi.json, docs/controller-openapi.json and docs/controller-api.md."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any, cast

from docs.generate.source import GENERATED, table
from kvstrata.clock import SystemClock
from kvstrata.config.controller_model import ControllerHttpSettings
from kvstrata.controller.app import make_app as make_controller_app
from kvstrata.controller.door import Door
from kvstrata.controller.surroundings import Surroundings
from kvstrata.observability.exposition import ServerCollector
from kvstrata.observability.metrics import ServerCounters
from kvstrata.process.http_gate import Access
from kvstrata.process.http_login import Logins
from kvstrata.server.http.app import make_app


def openapi() -> str:
    """docs/openapi.json, without the parts that depend only on the version of FastAPI or pydantic."""
    collector = ServerCollector("", ServerCounters(), dict)
    nobody = SimpleNamespace(readiness=lambda: (True, ""), collector=collector, tiers=None)
    return json_text(make_app(cast(Any, nobody)).openapi())


def json_text(document: dict[str, Any]) -> str:
    return json.dumps(_plain(document), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


@functools.cache
def _controller_document() -> dict[str, Any]:
    cluster = cast(Any, SimpleNamespace(readiness=lambda: (True, ""), epoch=0, clock=SystemClock()))
    door = Door(Access(ControllerHttpSettings(), ""), Logins(0), "")
    return make_controller_app(cluster, cast(Any, None), Surroundings(), door).openapi()


def controller_openapi() -> str:
    """docs/controller-openapi.json."""
    return json_text(_controller_document())


def controller_api() -> str:
    """docs/controller-api.md."""
    document = _plain(_controller_document())
    parts = [
        "# HTTP API of the controller\n\n",
        GENERATED.format("`src/kvstrata/controller/routes/`"),
        "\nOn the port of `--port` (9000); the same as OpenAPI in [controller-openapi.json](controller-openapi.json) "
        "and, from a running controller, at `/docs`. Every request but the probes, `/v1/login`, the dashboard's own "
        "files and, on loopback, `/metrics` carries `Authorization: Bearer TOKEN` "
        "([deploy.md](deploy.md#who-may-use-the-admin-port)), or the secrets of a browser that has "
        "[logged in](dashboard.md#logging-in). Errors are JSON "
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
