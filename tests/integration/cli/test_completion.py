"""The completion scripts in real shells: fish and zsh offer our commands and options (bash: tests/unit/cli)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.cli import completion
from tests.tools import fetch_debian

pytestmark = pytest.mark.integration

WAIT_S = 60
ROOT = "ROOT_OF_SHELL"
"""Variable with the folder of a fetched package, which stands for `/`."""

ZSHRC = """\
PS1='kv> '
autoload -Uz compinit
compinit -u -D
bindkey '^I' complete-word
compadd() {  # prints what matches, then adds it
  typeset -a hits
  builtin compadd -A hits "$@"
  (( $#hits )) && print -l -- HIT:${^hits}
  builtin compadd "$@"
}
"""
TYPE_A_LINE = """\
zmodload zsh/zpty
zpty inner $1 -i
zpty -r inner shown '*kv> *'
zpty -w -n inner $2$'\\t'
zpty -w -n inner $'\\C-u'"print DONE-\\${:-NOW}"$'\\n'
zpty -r inner shown '*DONE-NOW*'
print -r -- $shown
zpty -d inner
"""
"""A zsh script that types a line and TAB into another zsh, and prints what that one showed."""

Complete = Callable[[str], set[str]]


def fetched(name: str, inside: str) -> tuple[str, dict[str, str]]:
    """The shell on PATH, or Debian's in the cache folder; the test is skipped if neither can be had."""
    try:
        return fetch_debian.program(
            name,
            [name],
            inside=inside,
            variables=lambda root: {**fetch_debian.environment(root), ROOT: str(root)},
        )
    except fetch_debian.Unavailable as unavailable:
        pytest.skip(str(unavailable))


def script(shell: str, program: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert completion.main([shell, program]) == 0
    return capsys.readouterr().out


def output_of(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def fish(folder: Path, scripts: dict[str, str]) -> Complete:
    program, variables = fetched("fish", "usr/bin/fish")
    # fish loads the completions of programs that it finds.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**variables, "HOME": str(folder), "PATH": path}
    completions = folder / "completions"
    completions.mkdir()
    for name, text in scripts.items():
        (completions / f"{name}.fish").write_text(text)
    shared = Path(variables.get(ROOT, "/")) / "usr" / "share" / "fish" / "functions"
    commands = f"set fish_function_path {shared}; set fish_complete_path {completions}; complete -C $argv"
    return lambda line: {
        offered.partition("\t")[0]
        for offered in output_of([program, "--no-config", "-c", commands, line], environment).splitlines()
    }


def zsh(folder: Path, scripts: dict[str, str]) -> Complete:
    program, variables = fetched("zsh", "bin/zsh")
    for name, text in scripts.items():
        (folder / f"_{name}").write_text(text)
    places = f"fpath=({folder} $fpath)\n"
    if root := variables.get(ROOT):
        [modules] = Path(root).glob("usr/lib/*/zsh/*/zsh/zpty.so")
        functions = f"{root}/usr/share/zsh/functions/{{Completion,Completion/*,Misc,Zle}}(N/)"
        places = f"module_path=({modules.parents[1]})\nfpath=({folder} {functions})\n"
    (folder / ".zshenv").write_text(places)
    (folder / ".zshrc").write_text(ZSHRC)
    environment = {**variables, "ZDOTDIR": str(folder), "HOME": str(folder), "TERM": "dumb"}

    def complete(line: str) -> set[str]:
        shown = output_of([program, "-c", TYPE_A_LINE, "zsh", program, line], environment)
        return set(re.findall(r"HIT:(\S+)", shown))

    return complete


@pytest.mark.parametrize("shell", [fish, zsh])
def test_a_shell_offers_commands_and_options(
    shell: Callable[[Path, dict[str, str]], Complete], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = {name: script(shell.__name__, name, capsys) for name in completion.PROGRAMS}
    complete = shell(tmp_path, scripts)
    assert complete("kvstrata co") == {"completion", "controller"}
    assert complete("kvstrata ctl st") == {"status", "stranded"}
    assert complete("kvstrata ctl status --wa") == {"--watch"}
    assert complete("kvstrata ctl l2 re") == {"remove", "resume"}
    assert complete("kvstrata ctl clear --tier ") == {"l1", "l2", "all"}
    assert complete("lmcache-server --l1-size") == {"--l1-size-gb"}
    assert complete("lmcache-controller --snap") == {"--snapshot-dir"}
