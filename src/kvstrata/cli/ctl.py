"""`kvstrata ctl`: asks the admin port of a running server or controller, and prints a table, or JSON with `--json`.

Each row of COMMANDS is a command: its words, its request, its arguments, and how its answer is shown to people.  `pool`
asks nobody: it finds and reads the files of pools.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from kvstrata.cli import ctl_pool, pages
from kvstrata.cli.asking import TIMEOUT_S, Ask, ask, default_url, find_url, read_text, read_token
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.config.controller_model import ControllerHttpSettings
from kvstrata.config.log_model import Level
from kvstrata.errors import ConfigError

MAX_WAIT_S = 600


class Arg(NamedTuple):
    """An argument of a command, whose value is the field `field` of its request."""

    field: str
    flag: str
    """Empty: it is positional."""
    options: dict[str, Any]


def arg(field: str, flag: str = "", **options: Any) -> Arg:
    """An argument, with the options that argparse takes."""
    return Arg(field, flag, options)


class Command(NamedTuple):
    """One command.

    Fields that the path of `asks` names in braces go there, others into the query of a GET or the body of another
    method.  A PUT without values is a GET.
    """

    words: str
    asks: str
    help: str
    args: tuple[Arg, ...] = ()
    shown: Callable[[Any, argparse.Namespace], Any] = lambda answer, options: answer
    timeout_s: float = TIMEOUT_S
    """Time for the answer, on top of the command's own `--wait-s`."""


# --- answers for people -----------------------------------------------------------------------------------------------


def _utc(unix_ms: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_ms / 1000))


def _explained(answer: Mapping[str, Any], options: argparse.Namespace) -> Any:
    """One line for each lookup, of one request or of the recent ones."""

    def lookup(document: Mapping[str, Any]) -> dict[str, Any]:
        miss = document["first_miss"]
        detail = f" ({miss['detail']})" if miss and miss["detail"] else ""
        return {
            "at": _utc(document["unix_ms"]),
            "ms": document["duration_ms"],
            "tenant": document["tenant"],
            "chunks": document["chunks"],
            **document["hits"],
            "first_miss": miss and f"chunk {miss['chunk']}: {miss['reason']}{detail}",
        }

    if "recent" in answer:
        rows = [{"request_id": row["request_id"], **lookup(row)} for row in answer["recent"]]
        return rows or "no request yet"
    return {"request_id": answer["request_id"], "lookups": list(map(lookup, answer["lookups"]))}


def _adapters(answer: Mapping[str, Any], options: argparse.Namespace) -> Any:
    """One line for each L2 adapter."""
    rows = []
    for row in answer["adapters"]:
        usage, puts = row["usage"] or {}, row["puts"]
        opened = [operation for operation, state in row["breakers"].items() if state != "closed"]
        rows.append({
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
        })  # fmt: skip
    return rows or "no adapter"


def _instances(answer: Mapping[str, Any], options: argparse.Namespace) -> Any:
    """One line for each instance."""
    return [
        {
            "id": row["id"],
            "state": "draining" if row["draining"] else row["state"],
            "sync": row["sync"]["state"],
            "host": row["host"],
            "zone": row["zone"] or "-",
            "l1_keys": row["keys"].get("l1", 0),
            "l2_keys": sum(count for tier, count in row["keys"].items() if tier != "l1"),
            "l1_used_bytes": row["used_bytes"].get("l1", 0),
            "heard_ago_s": row["heard_ago_s"],
        }
        for row in answer["instances"]
    ] or "no instance"


def _events(answer: Mapping[str, Any], options: argparse.Namespace) -> Any:
    """One line for each event."""
    return [
        {
            "time": _utc(row["unix_ms"]),
            "number": row["number"],
            "kind": row["kind"],
            "instance": row["instance"] or "-",
            "facts": row["facts"],
        }
        for row in answer["events"]
    ] or "nothing happened"


def _placed(answer: Mapping[str, Any], options: argparse.Namespace) -> Any:
    return {key: value for key, value in answer.items() if key != "chunks"}


# --- arguments --------------------------------------------------------------------------------------------------------


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to {MAX_WAIT_S}, found {text!r}")
    return seconds


LEVEL = arg("level", nargs="?", type=str.lower, choices=get_args(Level), metavar="LEVEL",
    help=f"from now on, log from {', '.join(get_args(Level)[:-1])} or {get_args(Level)[-1]} upwards, until the "
    "process ends or gets SIGHUP (only show the level)")  # fmt: skip
TIER = arg("tier", "--tier", choices=("l1", "l2", "all"), default="l1", help="where (%(default)s)")
ONLY_TENANT = arg(
    "tenant", "--tenant", metavar="NAME", help="only this tenant's chunks (those of every tenant)"
)
IDENTITY = (
    arg("model", "--model", default="", metavar="NAME",
        help="the model of the engines (the only one that is known)"),
    arg("adapter", "--adapter", default="", metavar="NAME", help="LoRA adapter (none)"),
    arg("tenant", "--tenant", default="", metavar="NAME", help="tenant (the unnamed one)"),
    arg("salt", "--salt", default="", metavar="NAME", help="salt of the requests (none)"),
)  # fmt: skip
KIND = arg(
    "kind", "--kind", type=int, metavar="NUMBER", help="number in `models`, where several match (none)"
)
FILE_HELP = "JSON list of token ids, or of storage keys in hexadecimal; - reads stdin"
CHUNKS = (arg("tokens", metavar="FILE", help=FILE_HELP), KIND, *IDENTITY)
WAIT = arg("wait_s", "--wait-s", type=_seconds, default=5.0, metavar="S",
    help="longest wait for instances (%(default)s)")  # fmt: skip
NAME = arg("name", metavar="INSTANCE", help="its id, as `instances` prints it")
INSTANCES = arg("instances", "--instance", action="append", metavar="INSTANCE",
    help="only this instance; repeatable (all)")  # fmt: skip
TO = arg("to", "--to", required=True, metavar="INSTANCE", help="the instance that gets the chunks")
SOURCE = arg("source", "--source", metavar="INSTANCE", help="from where (the one with the longest prefix)")
TIER_NAME = arg("name", help="as `list` prints it, e.g. fs-0")
ADAPTERS, INSTANCE = "/v1/l2/adapters", "/v1/instances/{name}"

GROUPS = {
    "stranded": "sessions of dead processes whose GPU may still write into L1",
    "pool": "list or free pools, with or without a server",
    "cluster": "ask the controller of a cluster",
    "l2": "list, show, pause or resume L2 adapters",
}
COMMANDS = (
    Command("status", "GET /v1/status", "the server at a glance; --all: all that is known"),
    Command("top", "GET /v1/status", "what engines, tiers and tenants do now, drawn again and again"),
    Command("ready", "GET /readyz", "whether requests are served"),
    Command("explain", "GET /v1/explain/{request_id}", "why a recent request missed; without an id, recent requests",
        (arg("request_id", metavar="REQUEST_ID", nargs="?", default="",
             help="as the API returned it, or as the engine logs it"),), _explained),
    Command("clear", "POST /v1/clear", "drop chunks",
        (TIER, ONLY_TENANT, arg("wait", "--wait", action="store_true",
                                help="wait until the bytes of all dropped chunks are free, at most 30 s")),
        timeout_s=60),
    Command("prefetch", "POST /v1/prefetch", "load a prompt's chunks from L2 into L1",
        (arg("tokens", metavar="FILE", help="JSON list of token ids; - reads standard input"), *IDENTITY,
         arg("budget_bytes", "--budget-bytes", type=int, default=1 << 30, metavar="BYTES",
             help="load at most so many bytes (%(default)s)"))),
    Command("job", "GET /v1/prefetch/{number}", "outcome of a prefetch",
        (arg("number", metavar="NUMBER", type=int, help="as `prefetch` printed it"),)),
    Command("stranded list", "GET /v1/stranded", "the sessions, and the bytes that they keep in quarantine"),
    Command("stranded clear", "POST /v1/stranded/clear", "free the bytes; only once the GPU no longer writes",
        (arg("session", help="as `list` prints it, or `all`"),)),
    Command("quota", "PUT /v1/tenants/{tenant}/quota",
        "change how much of L1 a tenant may have, until the server ends",
        (arg("tenant", metavar="TENANT", help="its name"),
         arg("quota_gb", type=float, metavar="GB", help="its quota, in GB"))),
    Command("log-level", "PUT /v1/log-level", "show or change what the server logs", (LEVEL,)),
    Command("pool list", "", "the pools of this user: size, age, and which processes own them",
        (arg("roots", metavar="DIR", type=Path, nargs="*", help="folders to look below, by default /dev/shm"),)),
    Command("pool free", "", "give the memory of a pool back; refused while any server, keeper, host or engine owns it",
        (arg("pool", metavar="POOL", type=Path, help="folder, as `list` prints it"),)),
    Command("l2 list", f"GET {ADAPTERS}", "the adapters, nearest first; --json prints all that is known",
        shown=_adapters),
    Command("l2 pause", f"POST {ADAPTERS}/{{name}}/pause", "ask an adapter's storage nothing, until it is resumed",
        (TIER_NAME,)),
    Command("l2 resume", f"POST {ADAPTERS}/{{name}}/resume", "use a paused adapter as before", (TIER_NAME,)),
    Command("cluster status", "GET /v1/cluster", "what needs attention, and all that is known"),
    Command("cluster ready", "GET /readyz", "whether requests are served"),
    Command("cluster dashboard-link", "POST /v1/dashboard-link",
        "a link that opens the dashboard and logs a browser in, once, within 5 minutes",
        shown=lambda answer, options: answer["url"]),
    Command("cluster instances", "GET /v1/instances", "one line for each instance; --json prints all that is known",
        shown=_instances),
    Command("cluster instance", f"GET {INSTANCE}", "all that is known of one instance", (NAME,)),
    Command("cluster tiers", "GET /v1/tiers", "chunks and bytes by tier"),
    Command("cluster models", "GET /v1/models", "the kinds of KV that attached engines have"),
    Command("cluster log-level", "PUT /v1/log-level", "show or change what the controller logs", (LEVEL,)),
    Command("cluster events", "GET /v1/events", "recent events",
        (arg("after", "--after", type=int, metavar="NUMBER", help="only events after this number (the last ones)"),
         arg("wait_s", "--wait-s", type=_seconds, default=0.0, metavar="S",
             help="longest wait for a new event (%(default)g)")), _events),
    Command("cluster lookup", "POST /v1/lookup", "where the chunks of a prompt are", CHUNKS, _placed),
    Command("cluster pin", "POST /v1/pin", "keep chunks in the L1 of one instance",
        (*CHUNKS, WAIT, arg("instance", "--instance", metavar="INSTANCE",
                            help="where (the one with the longest prefix)"),
         arg("ttl_s", "--ttl-s", type=float, default=3_600.0, metavar="S", help="time until it ends (%(default)g)"))),
    Command("cluster pins", "GET /v1/pins", "pins that have not ended"),
    Command("cluster unpin", "POST /v1/unpin", "end a pin",
        (arg("claim", metavar="CLAIM", help="as `pins` prints it"), WAIT,
         arg("instance", "--instance", metavar="INSTANCE", help="needed for pins that are not listed (none)"))),
    Command("cluster replicate", "POST /v1/replicate", "copy chunks into the L1 of another instance",
        (*CHUNKS, WAIT, TO, SOURCE)),
    Command("cluster move", "POST /v1/move", "copy chunks as `replicate` does, and drop them at their source",
        (*CHUNKS, WAIT, TO, SOURCE)),
    Command("cluster clear", "POST /v1/clear", "drop chunks", (WAIT, TIER, ONLY_TENANT, INSTANCES)),
    Command("cluster evict", "POST /v1/evict", "drop chunks from L1",
        (*CHUNKS, WAIT, INSTANCES)),
    Command("cluster drain", f"POST {INSTANCE}/drain", "send no peers to an instance from now on", (NAME, WAIT)),
    Command("cluster undrain", f"POST {INSTANCE}/undrain", "use a drained instance as before", (NAME, WAIT)),
    Command("cluster resync", f"POST {INSTANCE}/resync", "ask an instance for a full sync", (NAME, WAIT)),
    Command("cluster remove", f"DELETE {INSTANCE}", "forget an instance; a live one may not join again", (NAME,)),
    Command("cluster allow", f"POST {INSTANCE}/allow", "let a removed instance join again", (NAME,)),
    Command("cluster runtime", f"GET {INSTANCE}/runtime", "threads, memory and environment of an instance",
        (NAME, WAIT)),
    Command("cluster document", f"GET {INSTANCE}/status", "status document of an instance", (NAME, WAIT)),
    Command("cluster commands", "GET /v1/commands", "recent commands to instances"),
    Command("cluster command", "GET /v1/commands/{number}", "state and result of a command",
        (arg("number", metavar="NUMBER", type=int, help="as `commands` prints it"),)),
)  # fmt: skip


def controller_url() -> str:
    """URL of a controller on this host with default settings."""
    http = ControllerHttpSettings()
    return f"http://{http.host}:{http.port}"


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata ctl`."""
    top = argparse.ArgumentParser(prog="kvstrata ctl", description=__doc__)
    _add_common(top)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {}
    for name, text in GROUPS.items():
        group = commands.add_parser(name, help=text)
        groups[name] = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    for one in COMMANDS:
        group_name, _, name = one.words.rpartition(" ")
        made = (groups[group_name] if group_name else commands).add_parser(name, help=one.help)
        made.set_defaults(row=one)
        for field, flag, options in one.args:
            # The field of a flag is its destination; `name` of a positional argument, too.
            more = {"dest": field} if flag else {}
            made.add_argument(
                *([flag] if flag else [options.get("dest", field)]),
                **({key: value for key, value in options.items() if key != "dest"} | more),
            )
        if one.words == "status":
            pages.add_page_flags(made)
        elif name == "top":
            pages.add_top_flags(made)
        _add_common(made, default=argparse.SUPPRESS)
    return top


def _add_common(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options that may stand before the command and after it. `default`: SUPPRESS keeps what stood before."""
    add = parser.add_argument
    add("--url", default=default or "",
        help=f"admin port ({default_url()}), for `cluster` the controller's ({controller_url()}); "
        "unix:PATH: a unix socket; without --url, a socket of this user is found if its server has none of these "
        "ports")  # fmt: skip
    add("--token-file", metavar="FILE", default=default or "",
        help="file with the bearer token; -: standard input (that of a server of this user)")  # fmt: skip
    add("--json", action="store_true", default=default or False, help="print JSON, all that the server said")


def request(options: argparse.Namespace) -> Ask:
    """The request for these arguments. Raises ConfigError."""
    row: Command = options.row
    method, _, path = row.asks.partition(" ")
    values = {field: getattr(options, field) for field, _, _ in row.args if field}
    wait_s = values.get("wait_s", 0.0)
    if "tokens" in values:
        values |= _chunks(values.pop("tokens"))
    for field in [field for field in values if f"{{{field}}}" in path]:
        path = path.replace(f"{{{field}}}", urllib.parse.quote(str(values.pop(field)), safe=""))
    path = path.rstrip("/")
    if method == "PUT" and all(value is None for value in values.values()):
        method = "GET"
    given = {field: value for field, value in values.items() if value is not None}
    if method == "GET":
        query = urllib.parse.urlencode(given)
        return Ask(f"{path}?{query}" if query else path, timeout_s=row.timeout_s + wait_s)
    body = None if method == "DELETE" else values
    return Ask(path, body, method, row.timeout_s + wait_s)


def _chunks(file: str) -> dict[str, Any]:
    """The tokens or keys in a file."""
    try:
        named = json.loads(read_text(file))
    except ValueError as error:
        raise ConfigError(f"FILE: {file}: not a JSON list: {error}") from None
    keys = isinstance(named, list) and bool(named) and isinstance(named[0], str)
    return {"keys" if keys else "tokens": named}


def reachable(link: dict[str, Any], url: str) -> dict[str, Any]:
    """The answer with a link, which leads to `url` if the user gave one: only the user may know how it is reached."""
    _, hash_mark, fragment = link["url"].partition("#")
    return {**link, "url": f"{url.rstrip('/')}/{hash_mark}{fragment}"} if url else link


def run(options: argparse.Namespace) -> Any:
    """Carry out one command; returns what is printed."""
    if options.command == "pool":
        return ctl_pool.run(options)
    asker = _asker(options)
    if options.row.words in ("status", "cluster status") and not options.json:
        return pages.everything(options, asker)
    answer = asker(request(options))
    if options.row.words == "cluster dashboard-link":
        answer = reachable(answer, options.url)
    return answer if options.json else options.row.shown(answer, options)


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
        url = options.url or find_url(controller_url(), "controller")
    else:
        url = options.url or find_url(default_url(), "server")
    return lambda asked: ask(url, asked, token=token)
