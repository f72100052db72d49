"""`kvstrata ctl`: asks the admin port of a running server or controller, and prints a table, or JSON with `--json`.

`pool` needs neither: it finds and reads the files of pools.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvstrata.cli import ctl_cluster, ctl_explain, ctl_pool
from kvstrata.cli.unix_http import opener
from kvstrata.config.model import HttpSettings
from kvstrata.config.tokens import bearer_token, read_bearer_token
from kvstrata.errors import BadRequest, KvstrataError, Unavailable
from kvstrata.process.http_token import find_sockets, find_token
from kvstrata.process.http_unix import SCHEME
from kvstrata.process.ports import port_uids
from kvstrata.text import printable

TIER_NAME = re.compile(r"[A-Za-z][\w]*-\d+")
TIMEOUT_S = 30
CLOSE_S = 60
"""Time for opening or closing an adapter, on top of the command's own `--wait-s`."""
MAX_WAIT_S = 600


class Ask(NamedTuple):
    """One request to the admin port."""

    path: str
    body: Mapping[str, Any] | None = None
    method: str = ""
    """Empty: GET without a body, POST with one."""
    timeout_s: float = TIMEOUT_S


def ask(url: str, asked: Ask, *, token: str = "") -> Any:
    """Ask the admin port; returns its JSON. Raises BadRequest for an HTTP error, Unavailable without an answer.

    If `token` is empty, the token that a local server has published is used, if any (process/http_token.py).
    """
    body = asked.body
    method = asked.method or ("GET" if body is None else "POST")
    base = "http://localhost" if url.startswith(SCHEME) else url.rstrip("/")
    request = urllib.request.Request(base + asked.path, method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if token := token or find_token(url):
        # An unredirected header is not sent to another port to which an answer redirects.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with opener(url).open(request, timeout=asked.timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise BadRequest(_message(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"--url: {url} does not answer ({reason}); is it running?") from None


def default_url() -> str:
    """URL of the admin port of a server on this host with default settings."""
    http = HttpSettings()
    return f"http://{http.host}:{http.port}"


def find_url(usual: str, kind: str) -> str:
    """The URL of our user's server or controller (`kind`) on this host: `usual`, or else its unix socket.

    Raises BadRequest if there are several sockets.
    """
    port = urllib.parse.urlsplit(usual).port or 0
    found = [] if os.geteuid() in port_uids(port) else find_sockets(kind)
    if len(found) > 1:
        raise BadRequest(
            f"--url: no {kind} of this user listens at {usual}, and several listen on sockets; choose one of "
            f"{', '.join(f'{SCHEME}{path}' for path in found)}",
            field="--url",
        )
    return f"{SCHEME}{found[0]}" if found else usual


def table(value: Any, indent: str = "") -> str:
    """Nested values as aligned lines; a list of mappings becomes a table with a header.

    Engines choose some of the texts, such as the name of a model, so nothing in them reaches the terminal as a command.
    """
    if isinstance(value, Mapping):
        named = {printable(str(key)): inner for key, inner in value.items()}
        width = max(map(len, named), default=0)
        lines = []
        for key, inner in named.items():
            if isinstance(inner, (Mapping, list)) and inner:
                lines.append(f"{indent}{key}")
                lines.append(table(inner, indent + "  "))
            else:
                lines.append(f"{indent}{key:<{width}}  {_cell(inner)}")
        return "\n".join(lines)
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        heads = list(dict.fromkeys(key for row in value for key in row))
        rows = [list(map(printable, heads))] + [
            [_cell(row.get(head, "-")) for head in heads] for row in value
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        return "\n".join(
            indent + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
    if isinstance(value, list):
        return "\n".join(f"{indent}{_cell(row)}" for row in value)
    return indent + _cell(value)


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata ctl`."""
    top = argparse.ArgumentParser(prog="kvstrata ctl", description=__doc__)
    top.add_argument(
        "--url",
        default="",
        help=f"admin port ({default_url()}), for `cluster` the controller's ({ctl_cluster.default_url()}); "
        "unix:PATH: a unix socket; without --url, a socket of this user is found if its server has none of these ports",
    )
    top.add_argument("--token-file", default="",
                     help="file with the bearer token; default: that of a server of the same user")  # fmt: skip
    top.add_argument("--json", action="store_true", help="print JSON")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("status", help="pool, sessions, adapters and counters")
    commands.add_parser("ready", help="whether requests are served")
    explain = commands.add_parser("explain", help="why a recent request missed")
    explain.add_argument(
        "request_id", metavar="REQUEST_ID", help="as the API returned it, or as the engine logs it"
    )
    clear = commands.add_parser("clear", help="drop chunks")
    clear.add_argument("--tier", choices=("l1", "l2", "all"), default="l1")
    clear.add_argument("--tenant")
    clear.add_argument(
        "--wait",
        action="store_true",
        help="wait until the bytes of all dropped chunks are free, at most 30 s",
    )
    prefetch = commands.add_parser("prefetch", help="load a prompt's chunks from L2 into L1")
    prefetch.add_argument("tokens", metavar="FILE", help="JSON list of token ids; - reads standard input")
    prefetch.add_argument("--model", default="")
    prefetch.add_argument("--adapter", default="")
    prefetch.add_argument("--tenant", default="")
    prefetch.add_argument("--salt", default="")
    prefetch.add_argument("--budget-bytes", type=int, default=1 << 30)
    job = commands.add_parser("job", help="outcome of a prefetch")
    job.add_argument("number", type=int)
    stranded = commands.add_parser(
        "stranded", help="sessions of dead processes whose GPU may still write into L1"
    )
    steps = stranded.add_subparsers(dest="action", required=True, metavar="ACTION")
    steps.add_parser("list", help="the sessions, and the bytes that they keep in quarantine")
    free = steps.add_parser("clear", help="free the bytes; only once the GPU no longer writes")
    free.add_argument("session", help="as `list` prints it, or `all`")
    quota = commands.add_parser(
        "quota", help="change how much of L1 a tenant may have, until the server ends"
    )
    quota.add_argument("tenant")
    quota.add_argument("quota_gb", type=float, metavar="GB")
    pool = commands.add_parser("pool", help="list, free or look into pools, with or without a server")
    ctl_pool.add(pool)
    cluster = commands.add_parser("cluster", help="ask the controller of a cluster")
    ctl_cluster.add(cluster, _seconds)
    l2 = commands.add_parser("l2", help="list, show, export, add, drain, resume or remove L2 adapters")
    actions = l2.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="the adapters, nearest first; --json prints all that is known")
    layers = actions.add_parser("show", help="the layers of adapters, from the storage outwards")
    layers.add_argument("name", nargs="?", default="", help="as `list` prints it, e.g. fs-0; by default all")
    actions.add_parser("export", help="the adapters as the `l2_adapters` of a configuration file")
    add = actions.add_parser("add", help="open an adapter and use it from now on")
    add.add_argument(
        "adapter",
        metavar="JSON|NAME",
        help="as for the server's --l2-adapter, - reads it from standard input; or the name of an adapter of the "
        "server's settings, e.g. fs-0",
    )
    add.add_argument(
        "--position",
        type=int,
        help="place in the order in which lookups ask the adapters, from 0; by default the last",
    )
    add.add_argument(
        "--backfill", action="store_true", help="offer the chunks that are in L1 now to the adapter"
    )
    drain = actions.add_parser("drain", help="give an adapter no new chunks, and wait for its puts")
    drain.add_argument("--no-loads", action="store_true", help="also keep lookups from asking the adapter")
    resume = actions.add_parser("resume", help="use a drained adapter as before")
    resume.add_argument(
        "--backfill", action="store_true", help="offer the chunks that are in L1 now to the adapter"
    )
    remove = actions.add_parser(
        "remove", help="drain an adapter and close it; its records stay on the medium"
    )
    for action in (drain, resume, remove):
        action.add_argument("name", help="as `list` prints it, e.g. fs-0")
    for action in (drain, remove):
        action.add_argument(
            "--wait-s",
            type=_seconds,
            default=10.0,
            metavar="S",
            help="longest wait for puts and loads under way (%(default)s)",
        )
    return top


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to {MAX_WAIT_S}, found {text!r}")
    return seconds


def run(options: argparse.Namespace) -> Any:
    """Carry out one command; returns the answer of the server or the content of the file."""
    if options.command == "pool":
        return ctl_pool.run(options)
    token = read_token("--token-file", options.token_file)
    if options.command == "cluster":
        url = options.url or find_url(ctl_cluster.default_url(), "controller")
    else:
        url = options.url or find_url(default_url(), "server")
    answer = ask(url, _request(options), token=token)
    if options.command == "cluster" and options.action == "dashboard-link":
        answer = ctl_cluster.reachable(answer, options.url)
    if options.command == "cluster":
        return answer if options.json else ctl_cluster.brief(options.action, answer)
    if options.command == "explain":
        return answer if options.json else ctl_explain.of_server(answer)
    if options.command == "l2" and options.action == "export":
        return _export(answer["adapters"])
    if options.command == "l2" and options.action == "show":
        return _layers(answer["adapters"], options.name)
    brief = options.command == "l2" and options.action == "list" and not options.json
    return _list(answer) or "no adapter" if brief else answer


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns exit status 0, or 1 with one line on standard error."""
    options = parser().parse_args(arguments)
    try:
        answer = run(options)
    except KvstrataError as error:
        print(f"kvstrata ctl: {error}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(answer, indent=1) if options.json else _text(options, answer), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _request(options: argparse.Namespace) -> Ask:
    match options.command:
        case "status":
            return Ask("/v1/status")
        case "ready":
            return Ask("/readyz")
        case "explain":
            return Ask(f"/v1/explain/{urllib.parse.quote(options.request_id)}")
        case "job":
            return Ask(f"/v1/prefetch/{options.number}")
        case "clear":
            body = {"tier": options.tier, "tenant": options.tenant, "wait": options.wait}
            return Ask("/v1/clear", body, timeout_s=CLOSE_S)
        case "stranded" if options.action == "list":
            return Ask("/v1/stranded")
        case "stranded":
            return Ask("/v1/stranded/clear", {"session": options.session})
        case "quota":
            path = f"/v1/tenants/{urllib.parse.quote(options.tenant, safe='')}/quota"
            return Ask(path, {"quota_gb": options.quota_gb}, "PUT")
        case "l2":
            return _l2_request(options)
        case "cluster":
            asked = ctl_cluster.request(options, _read)
            return Ask(asked.path, asked.body, asked.method, asked.wait_s + TIMEOUT_S)
    try:
        tokens = json.loads(_read(options.tokens))
    except ValueError as error:
        raise BadRequest(f"FILE: {options.tokens}: not a JSON list of token ids: {error}") from None
    fields = ("model", "adapter", "tenant", "salt", "budget_bytes")
    return Ask("/v1/prefetch", {"tokens": tokens, **{name: getattr(options, name) for name in fields}})


def _l2_request(options: argparse.Namespace) -> Ask:
    path = "/v1/l2/adapters"
    if options.action in ("list", "show", "export"):
        return Ask(path)
    if options.action == "add":
        text = _read("-") if options.adapter == "-" else options.adapter
        adapter: Any = text
        if not TIER_NAME.fullmatch(text):
            try:
                adapter = json.loads(text)
            except ValueError as error:
                # The text itself is not shown: it may hold a password.
                raise BadRequest(f"JSON: neither JSON nor the name of an adapter: {error}") from None
        body = {"adapter": adapter, "position": options.position, "backfill": options.backfill}
        return Ask(path, body, timeout_s=CLOSE_S)
    one = f"{path}/{urllib.parse.quote(options.name, safe='')}"
    if options.action == "resume":
        return Ask(f"{one}/resume", {"backfill": options.backfill})
    timeout_s = options.wait_s + CLOSE_S
    if options.action == "drain":
        return Ask(
            f"{one}/drain", {"loads": not options.no_loads, "wait_s": options.wait_s}, timeout_s=timeout_s
        )
    return Ask(f"{one}?wait_s={options.wait_s}", method="DELETE", timeout_s=timeout_s)


def _list(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The adapters as lines of a table; at the end, those that were removed and that the next start brings back."""
    there = [_brief(row) for row in answer["adapters"]]
    return there + [{"name": name, "state": "removed", "after_restart": "back"} for name in answer["missing"]]


def _layers(adapters: list[dict[str, Any]], name: str) -> list[dict[str, str]]:
    """The layers of one adapter or of all, one row for each layer. Raises BadRequest for an unknown name."""
    names = [row["name"] for row in adapters]
    if name and name not in names:
        raise BadRequest(f"no adapter {name!r}; there are: {', '.join(names) or 'none'}")
    return [
        {"name": row["name"], **layer}
        for row in adapters
        if name in ("", row["name"])
        for layer in row["layers"]
    ]


def _export(adapters: list[dict[str, Any]]) -> dict[str, Any]:
    """The configuration of these adapters, as it stands in a configuration file."""
    placed = [row for row in adapters if row["position"] is not None]
    for row in placed:
        for field in row["secrets_left_out"]:
            print(f"kvstrata ctl: {row['name']}: {field}: a secret is left out; fill it in", file=sys.stderr)
    return {"l2_adapters": [row["entry"] for row in placed]}


def _text(options: argparse.Namespace, answer: Any) -> str:
    if options.command == "l2" and options.action == "export":
        return yaml.safe_dump(answer, sort_keys=False, default_flow_style=False).rstrip("\n")
    return table(answer)


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """One adapter as a line of a table."""
    usage, puts = row["usage"] or {}, row["puts"]
    opened = [operation for operation, state in row["breakers"].items() if state != "closed"]
    return {
        "name": row["name"],
        "position": "-" if row["position"] is None else row["position"],
        "state": row["state"],
        "policy": row["policy"],
        "asked": row["takes_loads"],
        "waiting": sum(puts.get(name, 0) for name in ("queued", "retrying", "in_flight"))
        + row["backfill_left"],
        "stored": puts.get("outcomes", {}).get("stored", 0),
        "records": usage.get("records", "-"),
        "used_bytes": usage.get("used_bytes", "-"),
        "stuck_bytes": row["stuck_bytes"],
        "after_restart": "kept" if row["in_settings"] else "gone",
        "breakers": f"not closed: {', '.join(opened)}" if opened else "closed",
    }


def read_token(flag: str, path: str) -> str:
    """The bearer token of an admin port in this file, or on standard input for `-`; empty without a path.

    Raises ConfigError.
    """
    if not path:
        return ""
    if path == "-":
        return bearer_token(_read(path), "standard input", flag)
    return read_bearer_token(path, flag)


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path}: cannot be read: {error}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        body = json.load(error)
        return str(body.get("message") or body.get("why") or body)
    except (ValueError, AttributeError):
        return f"HTTP {error.code} {error.reason}"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(key)}={_part(inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(_part(inner) for inner in value) or "-"
    return "-" if value is None else printable(str(value)) or "-"


def _part(value: Any) -> str:
    return f"({_cell(value)})" if isinstance(value, (Mapping, list)) and value else _cell(value)
