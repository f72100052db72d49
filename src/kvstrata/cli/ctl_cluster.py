"""`kvstrata ctl cluster`: the controller's HTTP API as commands."""

from __future__ import annotations

import argparse
import json
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvstrata.cli import ctl_log
from kvstrata.cli.pages import add_page_flags
from kvstrata.config.controller_model import ControllerHttpSettings
from kvstrata.errors import ConfigError

DEFAULT_WAIT_S = 5.0
MAX_WAIT_S = 60.0


class ClusterAsk(NamedTuple):
    """One request: path, body and method, and how long the controller may wait for an instance."""

    path: str
    body: Mapping[str, Any] | None = None
    method: str = ""
    wait_s: float = 0.0


def default_url() -> str:
    """URL of a controller on this host with default settings."""
    http = ControllerHttpSettings()
    return f"http://{http.host}:{http.port}"


def add(parser: argparse.ArgumentParser, seconds: Callable[[str], float]) -> None:
    """Add the actions of `kvstrata ctl cluster`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=text)

    def named(name: str, text: str) -> argparse.ArgumentParser:
        made = action(name, text)
        made.add_argument("name", metavar="INSTANCE", help="its id, as `instances` prints it")
        return made

    def waiting(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made.add_argument("--wait-s", type=seconds, default=DEFAULT_WAIT_S, metavar="S",
                          help="longest wait for instances (%(default)s)")  # fmt: skip
        return made

    def chunks(made: argparse.ArgumentParser, *, required: bool = True) -> argparse.ArgumentParser:
        made.add_argument("tokens", metavar="FILE", nargs=None if required else "?",
                          help="JSON list of token ids, or of storage keys in hexadecimal; - reads stdin")  # fmt: skip
        made.add_argument(
            "--kind", type=int, metavar="NUMBER", help="number in `models`, where several match (none)"
        )
        add_identity(made)
        return made

    add_page_flags(action("status", "the cluster at a glance; --all: all that is known"))
    action("ready", "whether requests are served")
    action("dashboard-link", "a link that opens the dashboard and logs a browser in, once, within 5 minutes")
    action("instances", "one line for each instance; --json prints all that is known")
    named("instance", "all that is known of one instance")
    action("tiers", "chunks and bytes by tier")
    action("models", "the kinds of KV that attached engines have")
    ctl_log.add(action("log-level", "show or change what the controller logs"))
    events = action("events", "recent events")
    events.add_argument(
        "--after", type=int, metavar="NUMBER", help="only events after this number (the last ones)"
    )
    events.add_argument(
        "--wait-s", type=seconds, default=0.0, metavar="S", help="longest wait for a new event (%(default)g)"
    )
    chunks(action("lookup", "where the chunks of a prompt are"))
    pin = waiting(chunks(action("pin", "keep chunks in the L1 of one instance")))
    pin.add_argument("--instance", metavar="INSTANCE", help="where (the one with the longest prefix)")
    pin.add_argument(
        "--ttl-s", type=float, default=3_600.0, metavar="S", help="time until it ends (%(default)g)"
    )
    action("pins", "pins that have not ended")
    unpin = waiting(action("unpin", "end a pin"))
    unpin.add_argument("claim", metavar="CLAIM", help="as `pins` prints it")
    unpin.add_argument("--instance", metavar="INSTANCE", help="needed for pins that are not listed (none)")
    for name, text in (
        ("replicate", "copy chunks into the L1 of another instance"),
        ("move", "copy chunks as `replicate` does, and drop them at their source"),
    ):
        copy = waiting(chunks(action(name, text)))
        copy.add_argument("--to", required=True, metavar="INSTANCE", help="the instance that gets the chunks")
        copy.add_argument("--source", metavar="INSTANCE", help="from where (the one with the longest prefix)")
    clear = waiting(action("clear", "drop chunks"))
    clear.add_argument("--tier", choices=("l1", "l2", "all"), default="l1", help="where (%(default)s)")
    clear.add_argument(
        "--tenant", metavar="NAME", help="only this tenant's chunks of L1 (those of every tenant)"
    )
    evict = waiting(chunks(action("evict", "drop chunks from L1"), required=False))
    evict.add_argument(
        "--identity", metavar="HEX", help="all chunks of an identity, by the root that `lookup` prints (none)"
    )
    evict.add_argument("--whole-identity", action="store_true",
                       help="all chunks of the identity that --model, --adapter, --tenant and --salt make")  # fmt: skip
    evict.add_argument("--whole-tenant", action="store_true", help="all chunks of --tenant")
    waiting(named("drain", "send no peers to an instance from now on"))
    waiting(named("undrain", "use a drained instance as before"))
    waiting(named("resync", "ask an instance for a full sync"))
    named("remove", "forget an instance; a live one may not join again")
    named("allow", "let a removed instance join again")
    waiting(named("runtime", "threads, memory and environment of an instance"))
    waiting(named("document", "status document of an instance"))
    for made in (clear, evict):
        made.add_argument("--instance", action="append", dest="instances", metavar="INSTANCE",
                          help="only this instance; repeatable (all)")  # fmt: skip
    action("commands", "recent commands to instances")
    command = action("command", "state and result of a command")
    command.add_argument("number", metavar="NUMBER", type=int, help="as `commands` prints it")


def add_identity(parser: argparse.ArgumentParser) -> None:
    """Add the options that tell, beside the tokens, which chunks are meant."""
    for name, meaning in (
        ("model", "the model of the engines (the only one that is known)"),
        ("adapter", "LoRA adapter (none)"),
        ("tenant", "tenant (the unnamed one)"),
        ("salt", "salt of the requests (none)"),
    ):
        parser.add_argument(f"--{name}", default="", metavar="NAME", help=meaning)


def request(options: argparse.Namespace, read: Callable[[str], str]) -> ClusterAsk:
    """The request for these arguments. Raises ConfigError."""
    action = options.action
    if action in ("instances", "tiers", "models", "pins", "commands"):
        return ClusterAsk(f"/v1/{action}")
    match action:
        case "status":
            return ClusterAsk("/v1/cluster")
        case "ready":
            return ClusterAsk("/readyz")
        case "log-level":
            asked = ctl_log.request(options)
            return ClusterAsk(asked.path, asked.body, asked.method)
        case "dashboard-link":
            return ClusterAsk("/v1/dashboard-link", {})
        case "events":
            query = {"wait_s": options.wait_s}
            if options.after is not None:
                query["after"] = options.after
            return ClusterAsk(f"/v1/events?{urllib.parse.urlencode(query)}", wait_s=options.wait_s)
        case "command":
            return ClusterAsk(f"/v1/commands/{options.number}")
        case "lookup":
            return ClusterAsk("/v1/lookup", _chunks(options, read))
        case "pin":
            body = {**_chunks(options, read), "instance": options.instance, "ttl_s": options.ttl_s}
        case "unpin":
            body = {"claim": options.claim, "instance": options.instance}
        case "replicate" | "move":
            body = {**_chunks(options, read), "to": options.to, "source": options.source}
        case "clear":
            body = {"tier": options.tier, "tenant": options.tenant, "instances": options.instances}
        case "evict":
            body = {
                **_chunks(options, read),
                "identity": options.identity,
                "whole_identity": options.whole_identity,
                "whole_tenant": options.whole_tenant,
                "instances": options.instances,
            }
        case _:
            return _of_instance(options)
    return ClusterAsk(f"/v1/{action}", {**body, "wait_s": options.wait_s}, wait_s=options.wait_s)


def _of_instance(options: argparse.Namespace) -> ClusterAsk:
    path = f"/v1/instances/{urllib.parse.quote(options.name, safe='')}"
    match options.action:
        case "instance":
            return ClusterAsk(path)
        case "remove":
            return ClusterAsk(path, method="DELETE")
        case "allow":
            return ClusterAsk(f"{path}/allow", {})
        case "drain" | "undrain" | "resync":
            return ClusterAsk(f"{path}/{options.action}", {"wait_s": options.wait_s}, wait_s=options.wait_s)
    what = "status" if options.action == "document" else options.action
    return ClusterAsk(f"{path}/{what}?wait_s={options.wait_s}", wait_s=options.wait_s)


def _chunks(options: argparse.Namespace, read: Callable[[str], str]) -> dict[str, Any]:
    body = {name: getattr(options, name) for name in ("model", "kind", "adapter", "tenant", "salt")}
    if options.tokens is None:
        return body
    try:
        named = json.loads(read(options.tokens))
    except ValueError as error:
        raise ConfigError(f"FILE: {options.tokens}: not a JSON list: {error}") from None
    keys = isinstance(named, list) and bool(named) and isinstance(named[0], str)
    return {**body, "keys" if keys else "tokens": named}


def reachable(link: dict[str, Any], url: str) -> dict[str, Any]:
    """The answer with a link, which leads to `url` if the user gave one: only the user may know how it is reached."""
    _, hash_mark, fragment = link["url"].partition("#")
    return {**link, "url": f"{url.rstrip('/')}/{hash_mark}{fragment}"} if url else link


def brief(action: str, answer: Any) -> Any:
    """The part of an answer that is printed for people."""
    if action == "dashboard-link":
        return answer["url"]
    if action == "instances":
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
    if action == "events":
        rows = [
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row["unix_ms"] / 1000)),
                "number": row["number"],
                "kind": row["kind"],
                "instance": row["instance"] or "-",
                "facts": row["facts"],
            }
            for row in answer["events"]
        ]
        return rows or "nothing happened"
    if action == "lookup":
        return {key: value for key, value in answer.items() if key != "chunks"}
    return answer
