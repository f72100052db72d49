"""Each command of `kvstrata ctl`: its request, and what people see of an answer, against ctl_golden.txt.

`python -m tests.unit.cli.test_ctl_golden` writes the file anew.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

from kvstrata.cli import ctl
from kvstrata.cli.asking import Ask

GOLDEN = Path(__file__).with_name("ctl_golden.txt")
MISS = {"chunk": 3, "reason": "evicted", "detail": "by LRU at 7 (unix ms)"}
LOOKUP = {
    "request_id": "cmpl-7", "tenant": "", "unix_ms": 1_700_000_000_000, "duration_ms": 0.25, "chunks": 5,
    "hits": {"l1": 2, "l2": 1, "served": 3}, "first_miss": MISS,
}  # fmt: skip
ADAPTER = {
    "name": "fs-0", "state": "active", "policy": "through", "takes_loads": True, "under_way": 1, "stuck_bytes": 0,
    "usage": {"records": 9, "used_bytes": 1000}, "puts": {"queued": 2, "retrying": 1, "outcomes": {"stored": 7}},
    "breakers": {"load": "open", "put": "closed"},
}  # fmt: skip
INSTANCE = {
    "id": "a", "state": "live", "draining": True, "following": {"state": "exact"}, "host": "h", "zone": "",
    "keys": {"l1": 3, "fs-0": 4}, "used_bytes": {"l1": 5}, "heard_ago_s": 1.5,
}  # fmt: skip
EVENT = {"unix_ms": 1_700_000_000_000, "number": 7, "kind": "joined", "instance": "a", "facts": {"x": 1}}
DONE = {"done": True, "rows": [{"number": 1, "state": "done"}]}
CASES: dict[str, Any] = {
    "ready": {"ready": True, "why": ""},
    "explain": {"recent": [LOOKUP]},
    "explain a/b": {"request_id": "cmpl-7", "lookups": [LOOKUP, {**LOOKUP, "first_miss": None}]},
    "hint a/b 30": {"chunks": 4},
    "clear --tier all --tenant t --wait": {"dropped": 3},
    "claim TOKENS --bytes 5 --until-unix-s 7": {"claim": "c", "state": "kept"},
    "claims": {"claims": [{"claim": "c", "state": "kept"}]},
    "release a/b": {"claim": "a/b", "state": "released"},
    "stranded list": {"sessions": []},
    "stranded clear all": {"cleared": 1},
    "quota a/b 0.5": {"quota_gb": 0.5},
    "log-level": {"level": "info"},
    "log-level debug": {"level": "debug"},
    "l2 list": {"adapters": [ADAPTER], "missing": []},
    "l2 list --json": {"adapters": [], "missing": []},
    "l2 pause a/b": {"name": "a/b"},
    "l2 resume fs-0": {"name": "fs-0"},
    "cluster ready": {"ready": True},
    "cluster dashboard-link --url http://c:9000": {"url": "http://0.0.0.0:9000/#/login/x"},
    "cluster instances": {"instances": [INSTANCE]},
    "cluster instances --json": {"instances": []},
    "cluster instance a/b": INSTANCE,
    "cluster models": {"models": []},
    "cluster log-level warning": {"level": "warning"},
    "cluster events": {"events": [EVENT]},
    "cluster events --after 3 --wait-s 2": {"events": []},
    "cluster lookup TOKENS --kind 2": {"chunks": [1], "n_chunks": 1},
    "cluster claim KEYS --instance a --ttl-s 5": DONE,
    "cluster claims": {"claims": [], "unanswered": []},
    "cluster release c --wait-s 1": DONE,
    "cluster replicate TOKENS --to b": DONE,
    "cluster move TOKENS --to b --source a": DONE,
    "cluster clear --tier l2 --instance a --instance b": DONE,
    "cluster evict TOKENS": DONE,
    "cluster drain a": DONE,
    "cluster undrain a": DONE,
    "cluster resync a": DONE,
    "cluster remove a": {"removed": True},
    "cluster allow a": {"allowed": True},
    "cluster document a --wait-s 1": {"pool": {}},
    "gateway decision a/b --number 2": {"equal": True},
    "cluster lookup NOTHING": None,
    "l2 pause": None,
    "cluster replicate TOKENS": None,
    "cluster drain a --wait-s -1": None,
}  # fmt: skip
"""Answer of the server by the command."""
FILES = {"TOKENS": "[1, 2]", "KEYS": '["00"]', "NOTHING": "nope"}


def printed() -> str:
    """What all commands ask and print."""
    parts = []
    for words, answer in CASES.items():
        said: list[str] = []

        def answered(
            url: str, asked: Ask, *, token: str, answer: Any = answer, said: list[str] = said
        ) -> Any:
            body = json.dumps(asked.body, sort_keys=True) if asked.body is not None else "-"
            method = asked.method or ("GET" if asked.body is None else "POST")
            said.append(f"> {method} {asked.path} {body} {asked.timeout_s:g}\n")
            return answer

        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(ctl, "ask", answered),
            mock.patch("kvstrata.cli.asking.Path.read_text", lambda path, **_: FILES[str(path)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            status = ctl.main(shlex.split(words))
        errors = err.getvalue().splitlines()[-1:]
        parts += [
            f"$ ctl {words}\n",
            *said,
            out.getvalue(),
            *(f"! {line}\n" for line in errors),
            f"= {status}\n",
        ]
    return "".join(parts)


def test_each_command_asks_and_prints_as_before() -> None:
    assert printed() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(printed())
