"""All command lines: each option has help with its default and unit, common options stand anywhere, shells complete."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator

import pytest

from kvstrata.cli import completion, ctl
from kvstrata.cli.completion import PROGRAMS, SHELLS, programs
from kvstrata.cli.leaves import children, leaves

UNITS = {
    "s": "S SECONDS",
    "ms": "MS",
    "gb": "GB",
    "mb": "MB",
    "bytes": "BYTES N",
    "tokens": "TOKENS N",
    "chunks": "N",
}
"""By the last word of an option's name, its unit: the metavar. N where the help begins with the unit."""


def walk(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, parser
    for name, child in children(parser).items():
        yield from walk(f"{path} {name}", child)


PARSERS = {path: parser for program in programs().items() for path, parser in walk(*program)}


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    own = (argparse._HelpAction, argparse._SubParsersAction)
    return [action for action in parser._actions if not isinstance(action, own)]


def test_each_argument_has_help_with_its_default_and_unit() -> None:
    assert {"kvstrata ctl cluster status", "kvstrata bench serve trace", "lmcache-controller"} <= set(PARSERS)
    for path, parser in PARSERS.items():
        for action in arguments(parser):
            name = action.option_strings[-1] if action.option_strings else action.dest
            assert action.help, (path, name)
            takes_value = bool(action.option_strings) and action.nargs != 0
            if takes_value and not action.required:
                assert "(" in action.help, (path, name, "names no default")
            if takes_value and "-per-" not in name and (unit := UNITS.get(name.rpartition("-")[2])):
                assert str(action.metavar).partition("[")[0] in unit.split(), (path, name, action.metavar)


def test_common_options_stand_before_the_command_and_after_it() -> None:
    for leaf in leaves(ctl.parser()):
        options = {option for action in leaf._actions for option in action.option_strings}
        assert {"--url", "--token-file", "--json"} <= options, leaf.prog
    for words in (
        ["--url", "http://a:1", "--json", "status"],
        ["status", "--url", "http://a:1", "--json"],
        ["--json", "status", "--url", "http://a:1"],
    ):
        options = ctl.parser().parse_args(words)
        assert (options.url, options.json, options.token_file) == ("http://a:1", True, ""), words
    assert (
        ctl.parser().parse_args(["--url", "http://a:1", "status", "--url", "http://b:1"]).url == "http://b:1"
    )


@pytest.mark.parametrize(
    "words", [["--watch", "0"], ["--watch", "x"], ["--all", "--watch"], ["--watch", "nan"]]
)
def test_a_wrong_status_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["status", *words]) == 2
    assert "--watch" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_shell_gets_a_script(shell: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main([shell, program]) == 0
    script = capsys.readouterr().out
    assert program in script and "check" in script
    if program == "kvstrata":
        assert all(word in script for word in ("dashboard", "watch", "rewrite", "shared-prefix"))


def test_bash_completes_a_command_and_an_option(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)

    def complete(*words: str) -> list[str]:
        shell = (
            'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
            "_shtab_kvstrata kvstrata; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        ran = subprocess.run(
            ["bash", "-c", shell, "bash", str(script), *words], capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        return [word.strip() for word in ran.stdout.splitlines()]

    assert complete("kvstrata", "co") == ["controller", "completion"]
    assert complete("kvstrata", "ctl", "sta") == ["status"]
    assert complete("kvstrata", "ctl", "status", "--wa") == ["--watch"]
