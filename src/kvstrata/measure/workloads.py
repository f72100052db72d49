"""The workloads of `kvstrata bench serve`: rounds of requests, whose prompts are made of pieces that they may share.

Only `read_trace` does I/O.  A piece is a name and a length; the seed and the name alone determine its tokens.  So two
prompts that begin with the same pieces begin with the same tokens, in every run with that seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from kvstrata.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens that one block id of a trace stands for."""
LAST_MS = 1e15
"""Latest time of a request in a trace, in ms."""


class Piece(NamedTuple):
    """A run of tokens, the same wherever its name occurs."""

    name: str
    tokens: int


class Request(NamedTuple):
    """One request to endpoint number `endpoint`.

    `at_s`: seconds from the start of its round until it is sent; None: as soon as the limit of requests in flight
    allows.
    """

    pieces: tuple[Piece, ...]
    output_tokens: int
    endpoint: int
    at_s: float | None = None

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.tokens for piece in self.pieces)

    def prompt(self, seed: int, vocabulary: range) -> list[int]:
        """The prompt's token ids, all within `vocabulary`."""
        return [
            token
            for piece in self.pieces
            for token in random.Random(f"{seed}/{piece.name}").choices(vocabulary, k=piece.tokens)
        ]


class Workload(NamedTuple):
    """Rounds that run one after the other; `meaning` describes them in words."""

    name: str
    meaning: str
    rounds: list[list[Request]]


def long_documents(
    documents: int,
    document_tokens: int,
    question_tokens: int,
    output_tokens: int,
    *,
    rounds: int,
    endpoints: int,
) -> Workload:
    """Each round asks a new question about each document; from round to round a document moves to the next endpoint."""
    return Workload(
        "long-doc-qa",
        f"{documents} documents of {document_tokens} tokens, {rounds} rounds with another question of "
        f"{question_tokens} tokens about each, {output_tokens} tokens of answer",
        [
            [
                Request(
                    (Piece(f"document {d}", document_tokens), Piece(f"question {d} {r}", question_tokens)),
                    output_tokens,
                    (d + r) % endpoints,
                )
                for d in range(documents)
            ]
            for r in range(rounds)
        ],
    )


def shared_prefix_chat(
    users: int, turns: int, system_tokens: int, message_tokens: int, output_tokens: int, *, endpoints: int
) -> Workload:
    """All users share a system prompt; a round is one turn of every user, whose prompt holds all previous turns.

    Later prompts have made-up tokens in place of the model's answers, so that prompts do not depend on the model.
    """
    rounds = []
    said: list[list[Piece]] = [[Piece("system", system_tokens)] for _ in range(users)]
    for turn in range(turns):
        for user, pieces in enumerate(said):
            pieces.append(Piece(f"message {user} {turn}", message_tokens))
        rounds.append(
            [
                Request(tuple(pieces), output_tokens, (user + turn) % endpoints)
                for user, pieces in enumerate(said)
            ]
        )
        for user, pieces in enumerate(said):
            pieces.append(Piece(f"answer {user} {turn}", output_tokens))
    return Workload(
        "shared-prefix",
        f"{users} users with one system prompt of {system_tokens} tokens, {turns} turns with messages of "
        f"{message_tokens} tokens, {output_tokens} tokens of answer",
        rounds,
    )


class TraceRequest(NamedTuple):
    """One line of a trace: time, tokens of prompt and answer, ids of the prompt's blocks (the last may be partial)."""

    tokens: int
    blocks: list[int]
    at_ms: float
    output_tokens: int


class _TraceLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=LAST_MS)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int]


_trace_line = msgspec.json.Decoder(_TraceLine).decode


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace in the format that was published with Mooncake (FAST 2025).

    Its JSON lines have `timestamp`, `input_length`, `output_length` and `hash_ids`: one id per 512 tokens of the
    prompt, equal for equal prefixes.  Raises ConfigError, which names the file or the line and what is wrong with it.
    """
    requests = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path}: cannot be read: {error}", field="trace") from None
    for number, line in enumerate(lines, start=1):
        try:
            found = _trace_line(line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"--trace: {path}: line {number}: {error}: {line:.80}; write timestamp (in ms, from 0), input_length "
                "and output_length (in tokens, from 1) and hash_ids (a list of whole numbers), or leave the line out",
                field="trace",
            ) from None
        if found.input_length > len(found.hash_ids) * BLOCK_TOKENS:
            raise ConfigError(
                f"--trace: {path}: line {number}: input_length {found.input_length} does not fit "
                f"{len(found.hash_ids)} hash_ids of {BLOCK_TOKENS} tokens; add ids or leave the line out",
                field="trace",
            )
        requests.append(
            TraceRequest(found.input_length, found.hash_ids, found.timestamp, found.output_length)
        )
    if not requests:
        raise ConfigError(f"--trace: {path}: holds no request", field="trace")
    return requests


def synthetic_trace(requests: int = 6000, seed: int = 1) -> list[TraceRequest]:
    """A trace of conversations, in which the prompt of each turn is the previous prompt and some further blocks.

    The gap between turns is log-normal: its median is 3 % of the trace, and nine gaps in ten are below 14 %.  Most
    conversations have one turn, and one conversation in ten begins with a shared system prompt.  Requests come at three
    per second.
    """
    chance = random.Random(seed)
    outputs = random.Random(f"outputs {seed}")
    fresh = iter(range(1 << 60))
    shared = [[next(fresh) for _ in range(chance.randint(1, 4))] for _ in range(5)]
    turns: list[tuple[float, list[int]]] = []
    trace = []
    for now in range(requests):
        if turns and turns[0][0] <= now:
            blocks = heapq.heappop(turns)[1]
        else:
            blocks = list(chance.choice(shared)) if chance.random() < 0.1 else []
        blocks = blocks + [next(fresh) for _ in range(max(1, int(chance.lognormvariate(2.0, 1.0))))]
        output_tokens = max(1, int(outputs.lognormvariate(5.0, 1.0)))
        trace.append(TraceRequest(len(blocks) * BLOCK_TOKENS, blocks, now * 1000 / 3, output_tokens))
        if chance.random() < 0.45:
            gap = chance.lognormvariate(math.log(0.03 * requests), 1.2)
            heapq.heappush(turns, (now + gap, blocks))
    return trace


def replay(
    trace: Sequence[TraceRequest], name: str, *, speed: float, scale: float, most_tokens: int, endpoints: int
) -> Workload:
    """One round that sends every request at its time divided by `speed`, with lengths multiplied by `scale`.

    Requests whose scaled prompt and answer together exceed `most_tokens` are left out.  Raises ConfigError if none is
    left.
    """
    block_tokens = max(1, round(BLOCK_TOKENS * scale))
    first_ms = min(request.at_ms for request in trace)
    requests: list[Request] = []
    for request in sorted(trace, key=lambda each: each.at_ms):
        tokens = max(1, round(request.tokens * scale))
        output_tokens = max(1, round(request.output_tokens * scale))
        if tokens + output_tokens > most_tokens:
            continue
        pieces = []
        for block in request.blocks:
            taken = min(block_tokens, tokens)
            if taken > 0:
                pieces.append(Piece(f"block {block}", taken))
            tokens -= taken
        requests.append(
            Request(
                tuple(pieces),
                output_tokens,
                len(requests) % endpoints,
                (request.at_ms - first_ms) / 1000 / speed,
            )
        )
    if not requests:
        raise ConfigError(
            f"--max-tokens: no request of {name} is as short as {most_tokens} tokens; give a smaller --scale",
            field="max_tokens",
        )
    return Workload(
        "trace",
        f"{len(requests)} of {len(trace)} requests of {name}, {speed:g} times as fast, lengths × {scale:g}",
        [requests],
    )
