"""Command-line flags of server, controller and gateway: our own flags, and the mapping of LMCache's."""

from __future__ import annotations

import argparse
import functools
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstrata import __version__
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.demands import bare_type, number_in
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.lmcache.fates import Fate, Name, find, hint
from kvstrata.config.lmcache.flags import (
    BUFFER_ONLY,
    CONTROLLER_FLAGS,
    FLAG_PREFIXES,
    SERVER_FLAGS,
    entry_of_ours,
)
from kvstrata.config.load import leaves, load, put
from kvstrata.config.model import NO_HTTP, ServerSettings
from kvstrata.config.secrets import secrets_in
from kvstrata.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)
LMCACHE_NEEDS = {"size_gb", "eviction_policy"}
"""Settings of L1 whose flags `lmcache server` requires, and no command line of ours needs both."""
CLASSIC_POLICIES = {"lru", "isolatedlru", "arc", "s3fifo", "fifo", "lfu", "mru"}
"""Values of --eviction-policy, LMCache's among them, that are taken as VALUE."""


class Flags(NamedTuple):
    """A parsed command line: `settings` nested as in the file, `notes` for the log."""

    config_file: str
    settings: dict[str, Any]
    notes: list[str]
    check: bool
    ready_fd: int
    exposed: list[str]
    """Settings with secrets that were given on the command line, where every user of the machine can read them."""
    names: dict[str, str]
    """The flag of each setting that has one."""
    wrong: list[ConfigError]
    """Errors of the command line other than invalid values: unknown and refused flags, flags without their value."""

    def reader(self, struct: type[S], environment: Mapping[str, str], file: str = "") -> Callable[[], S]:
        """A function that reads the settings from file, environment and flags, anew each time.

        `file`: without `--config`.  The function raises ConfigError for all that is wrong, also about the command line.
        """
        return functools.partial(
            load,
            struct,
            file=self.config_file or file or None,
            environment=environment,
            flags=self.settings,
            flag_names=self.names,
            wrong_flags=self.wrong,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"command line: {message}")


# A key alone stands for the flag of its own name: `l1.size_gb` for `--l1-size-gb`.
SERVER = """
instance_id port socket_dir chunk_size l1.size_gb l1.use_hugepages l1.numa
--forget-on-exit=l1.forget_on_exit --eviction-policy=l1.eviction_policy
--l2-adapter=l2_adapters
http.host http.port --no-http=http.host controller.url --cluster-curve-file=controller.curve_file
p2p.engine p2p.listen p2p.advertise p2p.data_port p2p.tcp p2p.seal --zone=p2p.zone --insecure=security.insecure
--otlp-endpoint=observability.otlp_endpoint
"""
CONTROLLER = """
name http.host --host=http.host --port=http.port monitor_host monitor_ports heartbeat_s dead_after_s copies_mb_s
--snapshot-dir=directory.snapshot_dir --token-file=http.token_file --curve-secret-file=security.curve_secret_file
--etcd=etcd.endpoints --advertise-url=etcd.advertise_url --insecure=security.insecure
"""
GATEWAY = """
--engine=engines --host=http.host --port=http.port policy --token-file=http.token_file --picker=picker.listen
drain_s insecure envoy
"""


class Command(NamedTuple):
    """The command line of a process: its own flags, and what becomes of LMCache's."""

    struct: type[msgspec.Struct]
    about: str
    flags: str
    theirs: Mapping[str, Name] = MappingProxyType({})
    prefixes: Mapping[str, Name] = MappingProxyType({})


COMMANDS = {
    "lmcache-server": Command(
        ServerSettings, "KV-cache server for LLM inference. Without flags it runs with built-in defaults.",
        SERVER, SERVER_FLAGS, FLAG_PREFIXES,
    ),
    "lmcache-controller": Command(
        ControllerSettings,
        "Cluster controller, which tracks the chunks of each instance. Without flags it listens on this host only.",
        CONTROLLER, CONTROLLER_FLAGS,
    ),
    "lmcache-gateway": Command(
        GatewaySettings, "An OpenAI-compatible proxy that sends each request to one of several engines.", GATEWAY,
    ),
}  # fmt: skip
PICKER = "127.0.0.1:9002"
HELP = {
    "--l2-adapter": 'an L2 adapter, nearest first, repeatable: \'{"type": "disk", "base_path": "/data/kv", '
    '"capacity_gb": 200}\'; `none` for no L2 (a disk tier in the cache folder)',
    "--monitor-ports": "ZMQ port, as JSON ('{\"reply\": 8400}')",
    "--engine": "URL of an engine, http://HOST:PORT, or dns+http://NAME:PORT for all addresses of NAME; repeatable",
    "--p2p-tcp": "let UCX use TCP; anyone who can reach its ports can read and write this process's memory",
    "--picker": f"also serve as Envoy's endpoint picker, on this gRPC port ({PICKER} without HOST:PORT)",
    "--no-http": "do not open the admin HTTP port",
}
"""Help of the flags for which the setting's description does not fit."""


def parser_of(prog: str) -> argparse.ArgumentParser:
    """A parser of our own flags of a command; a flag that is not given is absent from the namespace."""
    struct, description, flags, *_ = COMMANDS[prog]
    parser = _Parser(
        prog=prog, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    add, known, defaults = parser.add_argument, dict(leaves(struct)), struct()
    add("--config", metavar="FILE", help="YAML file with any of the settings in docs/configuration.md (none)")
    for word in f"{flags} log_level log_format".split():
        name, _, key = word.rpartition("=")
        name = name or "--" + re.sub("[._]", "-", key)
        kind = bare_type(known.get(key, dict))
        metas = getattr(known.get(key), "__metadata__", ())
        first = "".join(meta.description or "" for meta in metas).partition(". ")[0].rstrip(".")
        default: Any = functools.reduce(getattr, key.split("."), defaults)
        about = HELP.get(name) or first + (f" ({default})" if default or default == 0 else "")
        more: dict[str, Any] = {"metavar": key.rpartition(".")[2].upper()}
        if name == "--no-http":
            more = {"action": "store_const", "const": NO_HTTP}
        elif kind is bool:
            more = {
                "action": argparse.BooleanOptionalAction if name == "--l1-use-hugepages" else "store_true"
            }
            about = HELP.get(name, first)
        elif kind in (int, float):
            more["type"] = number_in
        elif kind is dict:
            more["type"] = _json_object
        elif typing.get_origin(kind) is list:
            more["action"] = "append"
        if name == "--picker":
            more |= {"nargs": "?", "const": PICKER, "metavar": "HOST:PORT"}
        add(name, dest=key, help=about.replace("%", "%%"), **more)
    if prog == "lmcache-gateway":
        add(
            "--print-envoy",
            dest="print_envoy",
            action="store_true",
            help="print Envoy's configuration and exit",
        )
    add("--check", action="store_true", help="check the settings, print them and exit")
    add("--no-supervise", dest="no_supervise", action="store_true",
        help="run without the parent process that restarts this one, for example under systemd")  # fmt: skip
    add("--version", action="version", version=f"{prog} {__version__}", help="print the version and exit")
    add("--ready-fd", type=int, metavar="FD", help="descriptor that gets a line when ready (none)")
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}: {text!r:.200}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {text!r:.200}")
    return value


def parse(prog: str, arguments: Sequence[str]) -> Flags:
    """Parse the command line of a command. Raises nothing: `wrong` of the answer is for `load`."""
    flags = _parse(prog, arguments)
    if "engines" in flags.settings:
        flags.settings["engines"] = [{"url": url} for url in flags.settings["engines"]]
    l1 = flags.settings.get("l1", {})
    policy = str(l1.get("eviction_policy")).lower()
    if policy in CLASSIC_POLICIES:
        l1["eviction_policy"] = "VALUE"
        isolated = (
            "; `kvstrata ctl quota` and quotas_gb set a tenant's share of L1; a tenant without a quota shares L1 with "
            "all others, while LMCache stores nothing for it"
        )
        flags.notes.append(
            f"--eviction-policy {policy} is taken as VALUE, which learns which chunks are used again; in the file, "
            "`l1: {eviction_policy: LRU}` evicts strictly by last use"
            + (isolated if policy == "isolatedlru" else "")
        )
    elif policy == "noop" and any(word.rpartition("=")[2] == BUFFER_ONLY for word in arguments):
        l1["eviction_policy"] = "VALUE"
        flags.notes.append(
            f"--eviction-policy noop with --l2-store-policy {BUFFER_ONLY} is taken as VALUE: nothing is put to L2 "
            "twice, and stores are never refused because L1 is full of chunks that are in L2"
        )
    return flags


def server_settings(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Flags, Callable[[], ServerSettings]]:
    """The parsed command line of a server, and the reader of its settings."""
    flags = parse("lmcache-server", arguments)
    file = environment.get("KVSTRATA_CONFIG_FILE", "")
    named = (
        flags.config_file
        or file
        or "l2_adapters" in flags.settings
        or environment.get("KVSTRATA_L2_ADAPTERS")
    )
    read = flags.reader(ServerSettings, environment, file)
    if named or not flags.settings.get("l1", {}).keys() >= LMCACHE_NEEDS:
        return flags, read
    flags.notes.append(
        "no --l2-adapter: with --l1-size-gb and --eviction-policy, as for `lmcache server`, nothing is kept on "
        'disk; to add an L2, give --l2-adapter \'{"type": "disk", …}\''
    )
    return flags, lambda: msgspec.structs.replace(read(), l2_adapters=[])


def _parse(prog: str, arguments: Sequence[str]) -> Flags:
    parser, command = parser_of(prog), COMMANDS[prog]
    found = _sort_out(arguments, parser, command.theirs, command.prefixes)
    wrong = found.wrong
    try:
        parsed = vars(parser.parse_args(found.ours))
    except ConfigError as error:
        wrong.append(error)
        parsed = {}
    settings: dict[str, Any] = {}
    exposed: list[str] = []
    for name, value in found.settings.items():
        put(settings, name, value)
    for name, value in parsed.items():
        if name == "l2_adapters":
            try:
                entries = [entry_of_ours(one) for one in adapters_from_json(value)]
            except ConfigError as error:
                wrong.append(error)
                continue
            settings[name] = [entry for entry, _ in entries]
            found.notes.extend(f"--l2-adapter: {note}" for _, note in entries if note)
            exposed = [
                f"l2_adapters[{i}].{field}"
                for i, adapter in enumerate(settings[name])
                for field in secrets_in(adapter)
            ]
        elif name not in ("config", "check", "print_envoy", "ready_fd", "no_supervise"):
            put(settings, name, value)
    return Flags(
        parsed.get("config", ""),
        settings,
        found.notes,
        parsed.get("check", False),
        parsed.get("ready_fd", -1),
        exposed,
        found.names | {one.dest: one.option_strings[0] for one in parser._actions if one.dest in parsed},
        wrong,
    )


def adapters_from_json(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The adapters of repeated --l2-adapter flags; the single word `none` is an empty list. Raises ConfigError."""
    if list(texts) == ["none"]:
        return []
    adapters = []
    for index, text in enumerate(texts):
        where = f"l2_adapters[{index}]"
        try:
            adapter = json.loads(text)
        except json.JSONDecodeError as error:
            # The text itself is not shown: it may hold a password.
            raise ConfigError(f"--l2-adapter: {where}: not JSON: {error}", field=where) from None
        if not isinstance(adapter, dict):
            raise ConfigError(
                f'--l2-adapter: {where}: must be a JSON object with a "type", found {type(adapter).__name__}',
                field=where,
            )
        adapters.append(adapter)
    return adapters


class _Sorted(NamedTuple):
    """A command line without LMCache's flags."""

    ours: list[str]
    notes: list[str]
    wrong: list[ConfigError]
    settings: dict[str, Any]
    """Dotted settings that LMCache's flags stand for."""
    names: dict[str, str]
    """LMCache's flags of these settings."""


def _sort_out(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    theirs: Mapping[str, Name],
    prefixes: Mapping[str, Name],
) -> _Sorted:
    """Split LMCache's flags, and unknown ones, off the command line."""
    takes_value = {
        one: action.nargs not in (0, "?") for action in parser._actions for one in action.option_strings
    }
    found = _Sorted([], [], [], {}, {})
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        if not name.startswith("--") or name in takes_value:
            found.ours.append(argument)
            if takes_value.get(name) and not equals and rest:
                found.ours.append(rest.pop(0))
            continue
        words = [text] if equals else []
        # No command has arguments besides flags, so the words up to the next flag are this one's.
        while not equals and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        entry = find(name, theirs, prefixes)
        if entry is None:
            # A negation is suggested only in place of a negation.
            negations = (
                [] if name.startswith("--no-") else [one for one in takes_value if one.startswith("--no-")]
            )
            says = f"unknown flag{hint(name, takes_value, theirs, negations)}"
            found.wrong.append(ConfigError(f"command line: {name}: {says}", field=name))
        elif entry.fate is Fate.TRANSLATED:
            _take(name, entry, words, found)
        elif entry.asks(" ".join(words) if words else True):
            found.wrong.append(ConfigError(f"command line: {name}: {entry.say}", field=name))
        else:
            found.notes.append(f"{name} has no effect: {entry.say}")
    return found


def _take(name: str, entry: Name, words: list[str], found: _Sorted) -> None:
    """Set what a flag of LMCache stands for."""
    if len(words) != 1:
        found.wrong.append(ConfigError(f"command line: {name}: needs one value", field=name))
        return
    if not words[0]:
        found.notes.append(f"{name} has no effect: it is empty")
        return
    value: int | float | str = words[0]
    if entry.factor and not isinstance(number := number_in(words[0]), str):
        scaled = number * entry.factor
        value = int(scaled) if float(scaled).is_integer() else scaled
    found.settings[entry.target] = value
    found.names[entry.target] = name
    if entry.also:
        found.settings.setdefault(entry.also, value)
        found.names.setdefault(entry.also, name)
    found.notes.append(f"{name} is taken as {entry.target}: {entry.say}")
