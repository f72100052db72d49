"""Every command on a page, in a block or between backticks, is one that the program's own parser accepts."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvstrata import cli
from kvstrata.config.flags import COMMANDS, parse
from tests.harness.cases import case
from tests.unit.repository.test_pages import PAGES, ROOT

BLOCK = re.compile(r"^( *)```(?P<language>\w*)\n(?P<text>.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:kvstrata|lmcache-server|lmcache-controller|lmcache-gateway|make) [a-z-][^`\n]*)`")
COMMENT = re.compile(r"\s{2,}#.*$")
LABELS = re.compile(r"kvstrata (aes-gcm|mac|key id)\b")
"""Begin the names of keys in docs/formats.md, which are no commands."""
LEFT_OUT = re.compile(r"[…|\[]|\.\.\.")
"""In a text between backticks: parts that are left out, choices and options. Such a text is no whole command."""
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
PLACEHOLDER = re.compile(r"^[A-Z_]{2,}$")


class Accepted(BaseException):
    """A parser has accepted a command line."""


def lines_of_block(text: str, console: bool) -> Iterator[str]:
    """The command lines of a block. A line goes on after a backslash at its end, and while a quotation is open."""
    waiting = ""
    for line in text.splitlines():
        if waiting:
            waiting += "\n" + line.strip()
        elif not console:
            waiting = line.strip()
        elif line.strip().startswith("$ "):
            waiting = line.strip()[2:]
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        with contextlib.suppress(ValueError):  # a quotation is open
            shlex.split(waiting)
            yield COMMENT.sub("", waiting)
            waiting = ""


def commands_of(text: str) -> tuple[list[str], list[str]]:
    """The command lines of a page that start a program of this project: those in blocks, and those in sentences."""
    lines = [
        line
        for block in BLOCK.finditer(text)
        for line in lines_of_block(block["text"], block["language"] == "console")
        if line.split(" ")[0] in ("kvstrata", *COMMANDS, "make")
    ]
    inline = INLINE.finditer(BLOCK.sub("", text))
    return lines, [
        found[1] for found in inline if not LEFT_OUT.search(found[1]) and not LABELS.match(found[1])
    ]


@contextlib.contextmanager
def stopped_once_parsed() -> Iterator[None]:
    """No command is carried out: a parser that accepts its arguments raises Accepted."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        parse(self, *arguments)
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        yield


def refusal(words: Sequence[str]) -> str:
    """What a program of this project says against its arguments; empty if it accepts them."""
    if words[1:2] in (["server"], ["controller"], ["gateway"]):
        words = [f"lmcache-{words[1]}", *words[2:]]
    if words[0] in COMMANDS:
        return "\n".join(error.message for error in parse(words[0], words[1:]).wrong)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            with stopped_once_parsed():
                status: object = cli.main(words[1:])
        except Accepted:
            return ""
        except SystemExit as ended:
            status = ended.code
    return "" if status == 0 else said.getvalue()


def refusal_of_text(line: str) -> str:
    """As `refusal`, for a command within a sentence: the name of a command is enough, and GB stands for a number."""
    words = ["1" if PLACEHOLDER.match(word) else word for word in shlex.split(line)]
    said = refusal(words)
    return "" if "arguments are required" in said or "invalid choice: '1'" in said else said


def test_every_command_of_a_page_is_accepted() -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    for page in PAGES:
        if page.name == "changelog.md":  # it also names commands that are gone
            continue
        blocks, text = commands_of(page.read_text())
        for line in (*blocks, *text):
            with case(str(page.relative_to(ROOT)), line):
                words = shlex.split(line)
                if words[0] == "make":
                    named = {word for word in words[1:] if "=" not in word}
                    assert "-C" in words or named <= targets
                else:
                    assert not (refusal(words) if line in blocks else refusal_of_text(line))
                if "--l2-adapter" in words and line in blocks:
                    json.loads(words[words.index("--l2-adapter") + 1])


def four_hosts() -> tuple[dict[str, list[str]], str]:
    """The section of four hosts: the arguments of each command, by its first words, and the gateway's file."""
    section = (ROOT / "docs/cluster.md").read_text().partition("## Four hosts\n")[2].partition("\n## ")[0]
    blocks = [found["text"] for found in BLOCK.finditer(section)]
    words = [shlex.split(line) for text in blocks for line in lines_of_block(text, console=False)]
    commands = {each[0]: each[1:] for each in words if each[0].startswith("lmcache-")}
    [commands["kvstrata cluster init"]] = [
        each[1:] for each in words if each[:3] == ["kvstrata", "cluster", "init"]
    ]
    return commands, next(text for text in blocks if text.startswith("http:"))


def make_secrets(folder: Path) -> None:
    """The files of one key that the section names."""
    for secret in ("http.token", "engine.key", "red.key"):
        (folder / secret).touch(0o600)
        (folder / secret).write_text(f"{secret:_<40}")
