"""`kvstrata ctl`: asks the admin port of a running server or controller, and prints a table, or JSON with `--json`.

`pool` needs neither: it finds and reads the files of pools.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.cli import ctl_cluster, ctl_explain, ctl_log, ctl_pool, pages
from kvstrata.cli.asking import (
    TIMEOUT_S,
    Ask,
    ask,
    default_url,
    find_url,
    read_text,
    read_token,
)
from kvstrata.cli.boundary import guarded
from kvstrata.cli.leaves import leaves
from kvstrata.cli.table import table
from kvstrata.errors import BadRequest, ConfigError

CLEAR_S = 60
"""Time for the answer to a clear."""
MAX_WAIT_S = 600


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata ctl`."""
    top = argparse.ArgumentParser(prog="kvstrata ctl", description=__doc__)
    _add_common(top)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    pages.add_page_flags(
        commands.add_parser("status", help="the server at a glance; --all: all that is known")
    )
    pages.add_top_flags(
        commands.add_parser("top", help="what engines, tiers and tenants do now, drawn again and again")
    )
    commands.add_parser("ready", help="whether requests are served")
    explain = commands.add_parser(
        "explain", help="why a recent request missed; without an id, recent requests"
    )
    explain.add_argument("request_id", metavar="REQUEST_ID", nargs="?", default="",
        help="as the API returned it, or as the engine logs it")  # fmt: skip
    clear = commands.add_parser("clear", help="drop chunks")
    clear.add_argument("--tier", choices=("l1", "l2", "all"), default="l1", help="where (%(default)s)")
    clear.add_argument(
        "--tenant", metavar="NAME", help="only this tenant's chunks of L1 (those of every tenant)"
    )
    clear.add_argument(
        "--wait",
        action="store_true",
        help="wait until the bytes of all dropped chunks are free, at most 30 s",
    )
    prefetch = commands.add_parser("prefetch", help="load a prompt's chunks from L2 into L1")
    prefetch.add_argument("tokens", metavar="FILE", help="JSON list of token ids; - reads standard input")
    ctl_cluster.add_identity(prefetch)
    prefetch.add_argument(
        "--budget-bytes",
        type=int,
        default=1 << 30,
        metavar="BYTES",
        help="load at most so many bytes (%(default)s)",
    )
    job = commands.add_parser("job", help="outcome of a prefetch")
    job.add_argument("number", metavar="NUMBER", type=int, help="as `prefetch` printed it")
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
    quota.add_argument("tenant", metavar="TENANT", help="its name")
    quota.add_argument("quota_gb", type=float, metavar="GB", help="its quota, in GB")
    ctl_log.add(commands.add_parser("log-level", help="show or change what the server logs"))
    pool = commands.add_parser("pool", help="list, free or look into pools, with or without a server")
    ctl_pool.add(pool)
    cluster = commands.add_parser("cluster", help="ask the controller of a cluster")
    ctl_cluster.add(cluster, _seconds)
    l2 = commands.add_parser("l2", help="list, show, pause or resume L2 adapters")
    actions = l2.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="the adapters, nearest first; --json prints all that is known")
    layers = actions.add_parser("show", help="the layers of adapters, from the storage outwards")
    layers.add_argument("name", nargs="?", default="", help="as `list` prints it, e.g. fs-0; by default all")
    pause = actions.add_parser("pause", help="ask an adapter's storage nothing, until it is resumed")
    resume = actions.add_parser("resume", help="use a paused adapter as before")
    for action in (pause, resume):
        action.add_argument("name", help="as `list` prints it, e.g. fs-0")
    for each in leaves(top):
        _add_common(each, default=argparse.SUPPRESS)
    return top


def _add_common(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options that may stand before the command and after it. `default`: SUPPRESS keeps what stood before."""
    add = parser.add_argument
    add("--url", default=default or "",
        help=f"admin port ({default_url()}), for `cluster` the controller's ({ctl_cluster.default_url()}); "
        "unix:PATH: a unix socket; without --url, a socket of this user is found if its server has none of these "
        "ports")  # fmt: skip
    add("--token-file", metavar="FILE", default=default or "",
        help="file with the bearer token; -: standard input (that of a server of this user)")  # fmt: skip
    add("--json", action="store_true", default=default or False, help="print JSON, all that the server said")


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
    asker = _asker(options)
    if pages.is_status(options) and options.all and not options.json:
        return pages.everything(options, asker)
    answer = asker(_request(options))
    if options.command == "cluster" and options.action == "dashboard-link":
        answer = ctl_cluster.reachable(answer, options.url)
    if options.command == "cluster":
        return answer if options.json else ctl_cluster.brief(options.action, answer)
    if options.command == "explain":
        return answer if options.json else ctl_explain.of_server(answer) or "no request yet"
    if options.command == "l2" and options.action == "show":
        return _layers(answer["adapters"], options.name)
    if options.command == "l2" and options.action == "list" and not options.json:
        return [_brief(row) for row in answer["adapters"]] or "no adapter"
    return answer


@guarded("kvstrata ctl")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns 0. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    if pages.draws(options):
        pages.run(options, _asker(options))
        return 0
    answer = run(options)
    print(json.dumps(answer, indent=1) if options.json else table(answer))
    return 0


def _asker(options: argparse.Namespace) -> Callable[[Ask], Any]:
    """Asks the server, for `cluster` the controller, that the options name. Raises ConfigError."""
    token = read_token("--token-file", options.token_file)
    if options.command == "cluster":
        url = options.url or find_url(ctl_cluster.default_url(), "controller")
    else:
        url = options.url or find_url(default_url(), "server")
    return lambda asked: ask(url, asked, token=token)


def _request(options: argparse.Namespace) -> Ask:
    match options.command:
        case "status":
            return Ask("/v1/status")
        case "ready":
            return Ask("/readyz")
        case "explain":
            one = f"/{urllib.parse.quote(options.request_id)}" if options.request_id else ""
            return Ask(f"/v1/explain{one}")
        case "job":
            return Ask(f"/v1/prefetch/{options.number}")
        case "clear":
            body = {"tier": options.tier, "tenant": options.tenant, "wait": options.wait}
            return Ask("/v1/clear", body, timeout_s=CLEAR_S)
        case "stranded" if options.action == "list":
            return Ask("/v1/stranded")
        case "stranded":
            return Ask("/v1/stranded/clear", {"session": options.session})
        case "quota":
            path = f"/v1/tenants/{urllib.parse.quote(options.tenant, safe='')}/quota"
            return Ask(path, {"quota_gb": options.quota_gb}, "PUT")
        case "log-level":
            return ctl_log.request(options)
        case "l2":
            return _l2_request(options)
        case "cluster":
            asked = ctl_cluster.request(options, read_text)
            return Ask(asked.path, asked.body, asked.method, asked.wait_s + TIMEOUT_S)
    try:
        tokens = json.loads(read_text(options.tokens))
    except ValueError as error:
        raise ConfigError(f"FILE: {options.tokens}: not a JSON list of token ids: {error}") from None
    fields = ("model", "adapter", "tenant", "salt", "budget_bytes")
    return Ask("/v1/prefetch", {"tokens": tokens, **{name: getattr(options, name) for name in fields}})


def _l2_request(options: argparse.Namespace) -> Ask:
    path = "/v1/l2/adapters"
    if options.action in ("list", "show"):
        return Ask(path)
    return Ask(f"{path}/{urllib.parse.quote(options.name, safe='')}/{options.action}", {})


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


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """One adapter as a line of a table."""
    usage, puts = row["usage"] or {}, row["puts"]
    opened = [operation for operation, state in row["breakers"].items() if state != "closed"]
    return {
        "name": row["name"],
        "state": row["state"],
        "policy": row["policy"],
        "asked": row["takes_loads"],
        "waiting": sum(puts.get(name, 0) for name in ("queued", "retrying")),
        "under_way": row["under_way"],
        "stored": puts.get("outcomes", {}).get("stored", 0),
        "records": usage.get("records", "-"),
        "used_bytes": usage.get("used_bytes", "-"),
        "stuck_bytes": row["stuck_bytes"],
        "breakers": f"not closed: {', '.join(opened)}" if opened else "closed",
    }
