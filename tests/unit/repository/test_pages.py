"""The pages: links lead somewhere, the index is whole, generated pages are current, and commands parse."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from docs.generate.pages import stale
from kvstrata import cli
from kvstrata.config.flags import COMMANDS, parse
from kvstrata.rpc.wire import PROTOCOL_VERSION
from tests.harness.cases import case

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for folder in ("docs", "docker", "examples") for path in (ROOT / folder).rglob("*.md")),
    ]
)
ROOMS = ("benchmarks", "configs", "docker", "docs", "examples", "ext", "src", "tests")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    heads = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_generated_page_is_current() -> None:
    assert not list(stale()), "run `make docs`"


def test_the_page_of_the_protocol_is_that_of_its_version() -> None:
    assert f"\nVersion {PROTOCOL_VERSION}. " in (DOCS / "internals/protocol.md").read_text()


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in set(PAGES) - {DOCS / "changelog.md"}:  # which may name pages that are gone
        for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
            there = page.parent / target if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                wrong.append(f"{name(page)}: {target}#{anchor}")
    assert wrong == []


def test_files_that_a_page_names_are_there() -> None:
    """Paths from the root in backticks, unless they are patterns such as policy_NAME.cpp."""
    missing = [
        f"{name(page)}: {path}"
        for page in PAGES
        for path in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)`", page.read_text())
        if not re.search("[A-Z]{4}", path) and not (ROOT / path).exists()
    ]
    assert missing == []


def test_tests_that_a_page_names_are_there() -> None:
    named = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
    wrong = [
        f"{name(page)}: {path}::{test}"
        for page in PAGES
        for path, test in named.findall(page.read_text())
        if not (ROOT / path).exists() or f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert wrong == []


def test_nothing_promises_a_package_index_that_has_us() -> None:
    """`kvstrata` is on none, so whoever registers the name would get these installs: name the clone or a wheel file."""
    promise = re.compile(r"pip install[\s\"']+(?:-\S+[\s\"']+)*kvstrata(?![/.-])")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / file for file in listed.stdout.split("\0")[:-1]]
    texts = {file: file.read_text(errors="replace") for file in files if file.is_file()}
    assert [name(file) for file, text in texts.items() if promise.search(text)] == []


BLOCK = re.compile(r"^( *)```(?P<language>\w*)\n(?P<text>.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:kvstrata|lmcache-server|lmcache-controller|lmcache-gateway|make) [a-z-][^`\n]*)`")
COMMENT = re.compile(r"\s{2,}#.*$")
LABELS = re.compile(r"kvstrata (aes-gcm|mac|key id)\b")
"""Begin the names of keys in docs/internals/formats.md, which are no commands."""
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
