"""`kvstrata cluster`: makes the CURVE keys of a cluster whose hosts reach each other over a network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.rpc.zmq_curve import CONTROLLER, KeyFolder


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata cluster`."""
    top = argparse.ArgumentParser(
        prog="kvstrata cluster",
        description="Makes the CURVE keys of a cluster, one file for the controllers and one for each member. A member "
        "may register instances called NAME or NAME-…; the default ids of a host's instances begin with its host name.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    for command, text in (
        ("init", "make keys for a controller and for members"),
        ("add", "make keys for more members, or new ones for a member"),
        ("remove", "shut members out"),
    ):
        made = commands.add_parser(command, help=text)
        made.add_argument("folder", metavar="FOLDER", help="where the key files are kept")
        made.add_argument("names", metavar="NAME", nargs="+", help="a member, as a rule its host's name")
        if command != "remove":
            made.add_argument("--overwrite", action="store_true", help="replace keys that exist")
    return top


@guarded("kvstrata cluster")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    keys = KeyFolder(options.folder)
    match options.command:
        case "init":
            keys.make(options.names, overwrite=options.overwrite)
        case "add":
            keys.add(options.names, overwrite=options.overwrite)
        case _:
            keys.remove(options.names)
    for path in keys.written:
        flag = "--curve-secret-file" if path.stem == CONTROLLER else "--cluster-curve-file"
        process = "lmcache-controller" if path.stem == CONTROLLER else "lmcache-server"
        print(f"{path}  {process} {flag}")
    for name in keys.missing:
        print(f"{name}: its file is not in {keys.folder}; copy the `client` lines of another member into it")
    return 0
