"""The pages that people read: every link leads somewhere, the index names every page, generated pages are current."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from docs.generate.pages import stale

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
