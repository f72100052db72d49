"""`kvstrata completion`: a script with which a shell completes `kvstrata`, and the parsers of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded

SHELLS = ("bash", "zsh", "fish")
PROGRAMS = ("kvstrata", "lmcache-server", "lmcache-controller", "lmcache-gateway")


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata completion`."""
    top = argparse.ArgumentParser(
        prog="kvstrata completion",
        description="Prints a script with which a shell completes commands and options. bash: put "
        '`eval "$(kvstrata completion bash)"` into ~/.bashrc; zsh: write it to _kvstrata in a folder of $fpath; fish: '
        "write it to ~/.config/fish/completions/kvstrata.fish.",
    )
    top.add_argument("shell", choices=SHELLS, help="the shell")
    top.add_argument("program", choices=PROGRAMS, nargs="?", default=PROGRAMS[0],
        help="the program to complete (%(default)s)")  # fmt: skip
    return top


@guarded("kvstrata completion")
def main(arguments: Sequence[str] | None) -> int:
    """Print the script; returns 0."""
    import shtab

    options = parser().parse_args(arguments)
    print(shtab.complete(programs()[options.program], options.shell))
    return 0


def programs() -> dict[str, argparse.ArgumentParser]:
    """A parser for each of PROGRAMS, with those of all subcommands below it. Each call makes new ones."""
    from kvstrata.cli import cluster, ctl, doctor, l2, migrate, names, sim
    from kvstrata.cli.bench import cluster as bench_cluster
    from kvstrata.cli.bench import engine as bench_engine
    from kvstrata.cli.bench import l2 as bench_l2
    from kvstrata.cli.bench import serve as bench_serve
    from kvstrata.config.flags import controller_parser, gateway_parser, server_parser

    bench = bench_engine.parser()
    _put_below(bench, l2=bench_l2.parser(), serve=bench_serve.parser(), cluster=bench_cluster.parser())
    top = argparse.ArgumentParser(prog="kvstrata")
    _put_below(
        top,
        server=server_parser(),
        controller=controller_parser(),
        gateway=gateway_parser(),
        ctl=ctl.parser(),
        bench=bench,
        sim=sim.parser(),
        cluster=cluster.parser(),
        l2=l2.parser(),
        migrate=migrate.parser(),
        names=names.parser(),
        doctor=doctor.parser(),
        completion=parser(),
    )
    return dict(zip(PROGRAMS, (top, server_parser(), controller_parser(), gateway_parser()), strict=True))


def _put_below(top: argparse.ArgumentParser, **children: argparse.ArgumentParser) -> None:
    """Make parsers those of the subcommands of `top`."""
    commands = top.add_subparsers(metavar="COMMAND")
    for name, child in children.items():
        commands.add_parser(name, help=(child.description or "").partition(". ")[0])
        commands.choices[name] = child
