"""`kvstrata prewarm`: loads the KV of a prompt into L1 ahead of requests, and reports the cost and the saving.

Texts and conversations are tokenized by an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvstrata.cli.asking import Ask, ask, read_text, read_token, usual_url
from kvstrata.cli.boundary import Exit, guarded
from kvstrata.cli.table import table
from kvstrata.config.demands import problems, unwrapped
from kvstrata.config.model import HttpSettings
from kvstrata.errors import ConfigError, Unavailable
from kvstrata.server.admin.operations import Prompt

FLAGS = [one for one in msgspec.structs.fields(Prompt) if one.name not in ("tokens", "keys")]
PAUSE_S = 0.05
"""Between two looks at a job."""


@guarded("kvstrata prewarm")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status: FAILED if L1 has nothing of the prompt."""
    given = parser().parse_args(arguments)
    token = read_token("--token-file", given.token_file)

    def server(path: str, body: dict[str, Any] | None = None) -> Any:
        return ask(given.url, Ask(path, body), token=token)

    report = prewarmed(given, server) if given.job is None else server(f"/v1/prewarm/{given.job}")
    print(json.dumps(report, indent=1) if given.json else table(report))
    return Exit.DONE if report["l1_chunks"] + report["l2_chunks"] else Exit.FAILED


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata prewarm`."""
    top = argparse.ArgumentParser(
        prog="kvstrata prewarm", description="Load the KV of a prompt into L1 ahead of requests.",
        epilog="If OPENAI_API_KEY is set, it is sent to the engine.",
    )  # fmt: skip
    add, what = top.add_argument, top.add_mutually_exclusive_group(required=True)
    what.add_argument("prompt", nargs="?", metavar="PROMPT",
        help="JSON list of token ids, of storage keys in hexadecimal, or of chat messages, or a file that holds one; "
        "-: standard input")  # fmt: skip
    what.add_argument("--job", type=int, metavar="N", help="print the report of an earlier prewarm")
    add("--text", action="store_true", help="PROMPT is a text file; needs --engine")
    add("--engine", default="", metavar="URL", help="engine that tokenizes a text or messages")
    for field in FLAGS:
        kind, metas = unwrapped(field.type)
        default = f" ({field.default})" if field.default else ""
        add(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar=field.name.upper(),
            help=f"{metas[0].description}{default}")  # fmt: skip
    add("--url", default=usual_url(HttpSettings()), help="admin port of the server (%(default)s)")
    add("--token-file", metavar="FILE", default="",
        help="file with the admin port's bearer token; -: standard input "
        "(default: the token of this user's server)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return top


def prewarmed(given: argparse.Namespace, server: Callable[..., Any]) -> dict[str, Any]:
    """Load within the budgets; returns the report. Raises KvstrataError."""
    body = {field.name: getattr(given, field.name) for field in FLAGS} | prompt(given)
    for problem in problems(Prompt, body):
        raise ConfigError(f"{problem.path}: {problem.says}", field=problem.path)
    report: dict[str, Any] = server("/v1/prewarm", body)
    while report["state"] == "running":
        time.sleep(PAUSE_S)
        report = server(f"/v1/prewarm/{report['job']}")
    return report


def prompt(given: argparse.Namespace) -> dict[str, Any]:
    """The tokens or keys of the prompt."""
    content = given.prompt if given.prompt.lstrip().startswith("[") else read_text(given.prompt)
    if given.text:
        return tokenized(given, prompt=content)
    try:
        named = json.loads(content)
    except ValueError as error:
        what = "not a JSON list of token ids, keys or messages; for a text add --text"
        raise ConfigError(f"PROMPT: {given.prompt:.80}: {what}: {error}", field="PROMPT") from None
    first = named[0] if isinstance(named, list) and named else None
    if isinstance(first, dict):
        return tokenized(given, messages=named, add_generation_prompt=False)
    return {"keys" if isinstance(first, str) else "tokens": named}


def tokenized(given: argparse.Namespace, **what: Any) -> dict[str, Any]:
    """The engine's tokens of a text or a conversation."""
    if not given.engine:
        raise ConfigError("--engine: give the URL of an engine that tokenizes the prompt", field="--engine")
    asked = Ask("/tokenize", what | ({"model": given.adapter} if given.adapter else {}), timeout_s=60.0)
    answer = ask(given.engine, asked, token=os.environ.get("OPENAI_API_KEY", ""), flag="--engine")
    if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
        raise Unavailable(f"--engine: {given.engine} answers /tokenize without `tokens`, unlike vLLM")
    return {"tokens": answer["tokens"]}
