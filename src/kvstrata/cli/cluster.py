"""`kvstrata cluster`: makes the CURVE keys of a cluster whose hosts reach each other over a network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.rpc.zmq_curve import KeyFolder


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
        ("add", "make keys for further members, or new keys for a member"),
        ("remove", "revoke the keys of members"),
    ):
        made = commands.add_parser(command, help=text)
        made.add_argument("folder", metavar="FOLDER", help="folder of the key files")
        several = "+" if command == "remove" else "*"
        made.add_argument("names", metavar="NAME", nargs=several, help="a member, usually its host name")
        if command != "remove":
            made.add_argument(
                "--gateway", metavar="NAME", action="append", default=[], help="name of a gateway; repeatable"
            )
            made.add_argument("--overwrite", action="store_true", help="replace existing keys")
    return top


@guarded("kvstrata cluster")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    keys = KeyFolder(options.folder)
    match options.command:
        case "init":
            keys.make(options.names, options.gateway, overwrite=options.overwrite)
        case "add":
            keys.add(options.names, options.gateway, overwrite=options.overwrite)
        case _:
            keys.remove(options.names)
    for path in keys.written:
        print(f"{path}  {keys.use_of(path)}")
    for name in keys.missing:
        print(f"{name}: its file is not in {keys.folder}; copy the `client` lines of another member into it")
    return 0
