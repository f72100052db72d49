"""The command `kvstrata` and its subcommands."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvstrata import __version__
from kvstrata.cli.boundary import Command, Exit, guarded

USAGE = """\
usage: kvstrata COMMAND [arguments]

  server      run a cache server (also: lmcache-server)
  controller  run a cluster's controller (also: lmcache-controller)
  gateway     run a proxy in front of several engines (also: lmcache-gateway)
  ctl         administer a running server: status, explain, clear; `ctl cluster` administers a controller,
              `ctl gateway` a gateway, and `ctl pool` lists and frees pools without a server
  prewarm     load a prompt's KV into L1 ahead of requests, and report the cost and the saving
  bench       measure a running server on this host; `bench l2` measures one storage adapter, `bench serve` engines
  replay      compute the hit rates of L1s of other sizes on recorded requests
  sim         run a simulated engine with vLLM's HTTP interface, to test gateways and servers without a GPU
  plan        compute the best configuration for a recorded trace: roles of engines, size of L1, gain of more
  cluster     make or revoke the keys of a cluster: `cluster init`, `cluster add`, `cluster remove`
  doctor      check this machine, and the server that lmcache-server's flags describe; print what to fix

kvstrata COMMAND --help prints a command's options. kvstrata --version and kvstrata COMMAND --version print the
version; kvstrata --native-include-dir prints the folder of the C++ headers for storage connectors."""

COMMANDS = frozenset(re.findall(r"^  (\w+)  ", USAGE, re.MULTILINE))
"""Each is the module of its name here."""


@guarded("kvstrata")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else "--help"
    if command in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        return Exit.DONE if words else Exit.CONFIG
    if command == "--version" or words[1:2] == ["--version"]:
        print(f"kvstrata {__version__}")
        return 0
    if command == "--native-include-dir":
        print(native_include_dir())
        return 0
    run = _command(command)
    if run is None:
        print(f"kvstrata: unknown command {command!r}; see kvstrata --help", file=sys.stderr)
        return Exit.CONFIG
    return run(words[1:])


def native_include_dir() -> Path:
    """The include folder for compiling a storage connector; `kvstrata/connector.h` lies in it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "include"
    return installed if installed.is_dir() else package.parents[1] / "ext" / "core" / "include"


def _command(name: str) -> Command | None:
    """The subcommand's main function, or None for an unknown name; only this subcommand is imported."""
    if name not in COMMANDS:
        return None
    command: Command = import_module(f"kvstrata.cli.{name}").main
    return command
