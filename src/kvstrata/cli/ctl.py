"""`kvstrata ctl`: asks the admin port of a running server or controller, and prints a table, or JSON with `--json`.

The subcommands are the operations of a server that have a `ctl` name (process/operations.py); those of a controller and
a gateway are below `cluster` and `gateway`. `pool` sends no request: it finds and reads the files of pools.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import typing
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.cli import pages
from kvstrata.cli.asking import Ask, ask, read_text, read_token, usual_url
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.config.controller_model import ControllerHttpSettings
from kvstrata.config.demands import problems, unwrapped
from kvstrata.config.gateway_model import GatewayHttpSettings
from kvstrata.config.model import HttpSettings
from kvstrata.errors import ConfigError
from kvstrata.process.operations import Operation

DESCRIPTION = """Send a request to the admin port of a running server, and print the answer. `cluster` addresses
a controller, `gateway` a gateway; `pool` reads the files of pools and needs no server."""
GROUPS = {
    "stranded": "List or clear sessions of dead processes whose GPU may still write into L1",
    "pool": "List or free pools, with or without a server",
    "cluster": "Administer a cluster through its controller",
    "gateway": "Show the state and the decisions of a gateway",
    "l2": "List, pause or resume L2 adapters",
}
FILE = "JSON list of token ids, or of storage keys in hexadecimal; -: standard input"


def commands(group: str) -> dict[str, Operation]:
    """The operation of each command, by its words: of a server, of a controller for `cluster`, or of a `gateway`."""
    if group == "cluster":
        from kvstrata.controller.admin import OPERATIONS as found
    elif group == "gateway":
        from kvstrata.gateway.admin import OPERATIONS as found
    else:
        from kvstrata.server.admin.operations import OPERATIONS as found
    return {f"{group} {one.ctl}".strip(): one for one in found if one.ctl}


# --- answers for people -----------------------------------------------------------------------------------------------


def _utc(unix_ms: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_ms / 1000))


def _explained(answer: Mapping[str, Any]) -> Any:
    """One line for each lookup, of one request or of the recent ones."""

    def choice(one: Mapping[str, Any]) -> str:
        took_s, load_s, compute_s = (f"{one[name] or 0:.3g} s" for name in ("took_s", "load_s", "compute_s"))
        what = f"load, took {took_s}" if one["loads"] else "compute"
        return f"{one['adapter']}: {what} (expected: load {load_s}, compute {compute_s})"

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
            "choices": "; ".join(map(choice, document.get("choices", ()))) or None,
        }

    if "recent" in answer:
        rows = [{"request_id": row["request_id"], **lookup(row)} for row in answer["recent"]]
        return rows or "no request yet"
    return {"request_id": answer["request_id"], "lookups": list(map(lookup, answer["lookups"]))}


def _adapters(answer: Mapping[str, Any]) -> Any:
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


def _instances(answer: Mapping[str, Any]) -> Any:
    """One line for each instance."""
    return [
        {
            "id": row["id"],
            "state": "draining" if row["draining"] else row["state"],
            "followed": row["following"]["state"],
            "host": row["host"],
            "zone": row["zone"] or "-",
            "l1_keys": row["keys"].get("l1", 0),
            "l2_keys": sum(count for tier, count in row["keys"].items() if tier != "l1"),
            "l1_used_bytes": row["used_bytes"].get("l1", 0),
            "heard_ago_s": row["heard_ago_s"],
        }
        for row in answer["instances"]
    ] or "no instance"


def _events(answer: Mapping[str, Any]) -> Any:
    """One line for each event."""
    return [{"time": _utc(row.pop("unix_ms")), **row} for row in answer["events"]] or "no event"


SHOWN: dict[str, Callable[[Any], Any]] = {
    "explain": _explained,
    "l2 list": _adapters,
    "cluster instances": _instances,
    "cluster events": _events,
    "cluster lookup": lambda answer: {key: value for key, value in answer.items() if key != "chunks"},
    "cluster dashboard-link": lambda answer: answer["url"],
}
"""By command: the text shown to people; the answers of other commands are shown as they are."""


# --- arguments --------------------------------------------------------------------------------------------------------


def parser(group: str = "") -> argparse.ArgumentParser:
    """The command line of `kvstrata ctl`, with the commands of a server, and those below one group."""
    top = argparse.ArgumentParser(prog="kvstrata ctl", description=DESCRIPTION)
    _add_common(top)
    made = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {"": made}
    for name, text in GROUPS.items():
        groups[name] = made.add_parser(name, help=text).add_subparsers(
            dest="action", required=True, metavar="ACTION"
        )

    def add(words: str, text: str) -> argparse.ArgumentParser:
        above, _, name = words.rpartition(" ")
        one = groups[above].add_parser(name, help=text.replace("%", "%%"), description=text)
        one.set_defaults(words=words)
        _add_common(one, default=argparse.SUPPRESS)
        return one

    for words, operation in commands(group).items():
        command = add(words, operation.help)
        command.set_defaults(operation=operation)
        _add_arguments(command, operation)
        if words == "status":
            command.add_argument(
                "--all", action="store_true", help="print the whole status document instead of one page"
            )
    add("pool list", "List the pools of this user: size, age, and the processes that own them").add_argument(
        "roots", metavar="DIR", type=Path, nargs="*", help="folders to search (/dev/shm)"
    )
    add(
        "pool free",
        "Delete a pool and free its memory; refused while a server, keeper, adapter host or engine owns it",
    ).add_argument("pool", metavar="POOL", type=Path, help="folder of the pool, as `pool list` prints it")
    return top


def _add_arguments(command: argparse.ArgumentParser, operation: Operation) -> None:
    """Add the fields of a request: those in the path and those without a default are positional."""
    for field in msgspec.structs.fields(operation.ask):
        kind, metas = unwrapped(field.type)
        if field.name == "keys":
            continue  # which FILE may hold, too
        name, metavar = field.name, field.name.upper()
        more: dict[str, Any] = {}
        text = " ".join(meta.description for meta in metas if meta.description)
        if name == "tokens":
            metavar, text = "FILE", FILE
        elif typing.get_origin(kind) is typing.Literal:
            more = {"choices": typing.get_args(kind), "type": str.lower}
            text += f" One of {', '.join(typing.get_args(kind))}."
        elif kind is bool:
            more = {"action": "store_true"}
        elif typing.get_origin(kind) is list:
            more, name = {"action": "append"}, name.removesuffix("s")
            metavar, text = name.upper(), f"{text} Repeatable."
        elif kind in (int, float):
            more = {"type": kind}
        if kind is not bool:
            more["metavar"] = metavar
        is_named = any(meta.extra and "flag" in meta.extra for meta in metas)
        if name == "tokens" or name in operation.in_path or (field.required and not is_named):
            is_optional = operation.shows or not (field.required or name == "tokens")
            more["nargs"] = "?" if is_optional else None
            names = [field.name]
        else:
            more |= {"dest": field.name, "required": field.required}
            names = [f"--{name.replace('_', '-')}"]
        default = None if field.default is msgspec.NODEFAULT else field.default
        if default:
            text += f" ({default})"
        command.add_argument(*names, default=default, help=text.replace("%", "%%"), **more)


def _add_common(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options allowed before and after the command. `default`: SUPPRESS keeps a value given before it."""
    add = parser.add_argument
    add(
        "--url",
        default=default or "",
        help=f"URL of the admin port ({usual_url(HttpSettings())}; for `cluster` {controller_url()}, for `gateway` "
        f"{usual_url(GatewayHttpSettings())})",
    )
    add("--token-file", metavar="FILE", default=default or "",
        help="file with the bearer token; -: standard input (default: the token of this user's server)")  # fmt: skip
    add("--json", action="store_true", default=default or False, help="print the whole answer as JSON")


def controller_url() -> str:
    """URL of a controller on this host with default settings."""
    return usual_url(ControllerHttpSettings())


def request(options: argparse.Namespace) -> Ask:
    """The request for these arguments. Raises ConfigError."""
    one: Operation = options.operation
    method, path = one.method, one.path.replace(":path", "")
    values = {name: getattr(options, name) for name in one.ask.__struct_fields__ if hasattr(options, name)}
    if "tokens" in values:
        values |= _chunks(values.pop("tokens"))
    if one.shows and all(value is None for value in values.values()):
        return Ask(path, timeout_s=one.timeout_s)
    for problem in problems(one.ask, values):
        raise ConfigError(f"{problem.path}: {problem.says}", field=problem.path)
    timeout_s = one.timeout_s + values.get("wait_s", 0.0)
    for name in one.in_path:
        path = path.replace(f"{{{name}}}", urllib.parse.quote(str(values.pop(name)), safe=""))
    path = path.rstrip("/")
    if method == "GET":
        query = urllib.parse.urlencode({name: value for name, value in values.items() if value is not None})
        return Ask(f"{path}?{query}" if query else path, timeout_s=timeout_s)
    return Ask(path, None if method == "DELETE" else values, method, timeout_s)


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
        return _pools(options)
    asker = _asker(options)
    if options.words in ("status", "cluster status") and not options.json:
        return pages.everything(options, asker)
    answer = asker(request(options))
    if options.words == "cluster dashboard-link":
        answer = reachable(answer, options.url)
    shown = SHOWN.get(options.words)
    return answer if options.json or shown is None else shown(answer)


def _pools(options: argparse.Namespace) -> Any:
    """List the pools of this machine, or free one, with or without a server. Raises SegmentError or ConfigError."""
    # These alone load the compiled modules; the other commands also run on a machine that lacks them.
    from kvstrata.memory import pools
    from kvstrata.memory.paths import SHM_ROOT

    if options.action == "free":
        place = options.pool.absolute()
        freed = pools.free(place)
        whole = freed._asdict() | {"place": str(freed.place)}
        return whole if options.json else f"freed {pages.size(freed.memory_bytes)} of {place}"
    found = pools.find_pools(options.roots or (SHM_ROOT,))
    if options.json:
        return [pool._asdict() | {"place": str(pool.place)} for pool in found]
    return [
        {
            "pool": str(pool.place),
            "memory": pages.size(pool.memory_bytes),
            "age": pages.span(pool.age_s),
            "idle": "-" if pool.idle_s is None else pages.span(pool.idle_s),
            "owned_by": ", ".join(pool.owners) or "nobody",
        }
        for pool in found
    ] or "no pool of this user was found"


@guarded("kvstrata ctl")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns 0. Raises KvstrataError."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    group = next((word for word in words if word in ("cluster", "gateway")), "")
    options = parser(group).parse_args(words)
    if options.words == "status" and not (options.all or options.json):
        print("\n".join(pages.server_page(pages.see_server(_asker(options)))))
        return 0
    answer = run(options)
    print(json.dumps(answer, indent=1) if options.json else table(answer))
    return 0


def _asker(options: argparse.Namespace) -> Callable[[Ask], Any]:
    """Asks the server, for `cluster` the controller, that the options name. Raises ConfigError."""
    token = read_token("--token-file", options.token_file)
    kinds = {"cluster": ControllerHttpSettings, "gateway": GatewayHttpSettings}
    url = options.url or usual_url(kinds.get(options.command, HttpSettings)())
    return lambda asked: ask(url, asked, token=token)
