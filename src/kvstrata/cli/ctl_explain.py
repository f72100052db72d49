"""What `ctl explain` prints for people: one line for each lookup.

`--json` prints the whole answer, with identities and storage keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def of_server(answer: Mapping[str, Any]) -> Any:
    """The answer of a server's `/v1/explain` as rows: of one request, or of the recent ones."""
    if "recent" in answer:
        return [{"request_id": row["request_id"], **_lookup(row)} for row in answer["recent"]]
    return {"request_id": answer["request_id"], "lookups": [_lookup(row) for row in answer["lookups"]]}


def _lookup(document: Mapping[str, Any]) -> dict[str, Any]:
    miss = document["first_miss"]
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(document["unix_ms"] / 1000)),
        "ms": document["duration_ms"],
        "tenant": document["tenant"],
        "chunks": document["chunks"],
        **document["hits"],
        "first_miss": miss and f"chunk {miss['chunk']}: {_because(miss)}",
    }


def _because(told: Mapping[str, Any]) -> str:
    return f"{told['reason']} ({told['detail']})" if told["detail"] else told["reason"]
