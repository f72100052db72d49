"""Commands that read a trace: what `kvstrata plan` says of it, and what `kvstrata replay` does."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest

from kvstrata.cli import replay
from kvstrata.cli.plan import Row, computed, main, read_trace
from kvstrata.server.request_log import HEADER, MAGIC


def trace(folder: Path, *, shared: int, answer: int, gap_ms: float = 150) -> str:
    """Prompts of 8,192 tokens, of which so many blocks are one of 20 documents."""
    draw, now, lines = random.Random(3), 0.0, []
    for number in range(800):
        now += draw.expovariate(1 / gap_ms)
        which = draw.randrange(20)
        ids = [which * 100 + at for at in range(shared)] + [
            10_000 + number * 16 + at for at in range(16 - shared)
        ]
        row = {"timestamp": now, "input_length": 8_200, "output_length": answer, "hash_ids": ids}
        lines.append(json.dumps(row))
    (folder / "trace").write_text("\n".join(lines))
    return str(folder / "trace")


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_trace_says_whether_to_split_and_how_much_memory_is_enough(tmp_path, capsys):
    long = trace(tmp_path, shared=0, answer=100)
    found = report(capsys, "--trace", long, "--gpus", "4", "--tpot-ms", "15")
    assert found["split"] is True and found["l1_gb"] == 32  # nothing returns, so the smallest will do
    short = trace(tmp_path, shared=15, answer=100, gap_ms=600)
    found = report(capsys, "--trace", short, "--gpus", "4", "--l1-gb", "8", "--tpot-ms", "50")
    assert found["split"] is False and found["in_time"] > 0.95
    # 20 documents of 15 blocks have 20 GB, and what is computed once passes through beside them.
    assert 16 <= found["l1_gb"] <= 64
    [more] = [one for one in found["buys"] if one["what"].startswith("4 ×")]
    assert more["computing_s"] > 0


def test_a_larger_cache_never_computes_more_and_the_last_token_always(tmp_path: Path) -> None:
    _, rows = read_trace(trace(tmp_path, shared=10, answer=10), 1)
    sums = [sum(computed(rows, blocks, 512)) for blocks in (0, 50, 200, 1_000, 100_000)]
    assert sums == sorted(sums, reverse=True) and sums[0] == 800 * 8_200
    assert sums[-1] == 800 * 8_200 - (800 - 20) * 10 * 512


def test_the_end_of_the_oldest_prompt_leaves_the_cache_first() -> None:
    asked = ([1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6])
    rows = [Row(at, ids, input_length=3 * 512 + 1, output_length=1) for at, ids in enumerate(asked)]
    # Of the third prompt the cache of five lacks its last block, for which that of the fourth leaves.
    assert computed(rows, 5, 512) == [1_537, 1_537, 513, 513]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "two requests with different timestamps"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1}\n{"timestamp": 2}',
            "line 2: not a request",
        ),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length"),
        ("[]", "line 1: not a request"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path, capsys, content, says):
    (tmp_path / "trace").write_text(content)
    assert main(["--trace", str(tmp_path / "trace"), "--gpus", "2"]) == 2
    assert says in capsys.readouterr().err


def test_a_model_must_have_the_fields_of_an_engine(tmp_path, capsys):
    (tmp_path / "model").write_text('{"step_us": 7000, "prefil_token_us": 3}')
    words = [
        "--trace",
        trace(tmp_path, shared=1, answer=9),
        "--gpus",
        "1",
        "--model",
        str(tmp_path / "model"),
    ]
    assert main(words) == 2
    assert "prefil_token_us" in capsys.readouterr().err


def test_the_log_of_a_server_is_a_trace_up_to_the_request_that_was_cut(tmp_path: Path) -> None:
    requests = [struct.pack("<QII3q", number * 10**9, 3, 0, 1, 2, number) for number in range(4)]
    log = HEADER.pack(MAGIC, 16, 0, 0) + b"".join(requests)
    (tmp_path / "log").write_bytes(log[:-1])
    block_tokens, rows = read_trace(str(tmp_path / "log"), 99)
    assert (block_tokens, [one.timestamp for one in rows]) == (16, [0.0, 1_000.0, 2_000.0])
    assert (rows[2].input_length, rows[2].output_length, rows[2].hash_ids) == (49, 99, [1, 2, 2])


def test_late_stores_add_to_the_engines_own_cache(tmp_path, capsys):
    trace = tmp_path / "turns.jsonl"
    turns = [
        {"timestamp": 1_000 * turn, "hash_ids": [*range(10 * (turn % 2), 10 * (turn % 2) + 10)]}
        for turn in range(20)
    ]
    trace.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    hits = {}
    for store in ("commit", "late"):
        words = [
            str(trace),
            "--chunk-mb",
            "1",
            "--l1-size-gb",
            "0.01",
            "--engine-gb",
            "0.01",
            "--l2",
            "--json",
        ]
        assert replay.main([*words, "--store", store]) == 0
        size = json.loads(capsys.readouterr().out)["sizes"][0]
        assert size["chunks"] == 10  # GB are 2^30 bytes
        hits[store] = size["hits_LRU"]
    assert hits == {"commit": 0.0, "late": 0.9}
    assert replay.main([str(trace), "--chunk-mb", "1", "--store", "late"]) != 0
    assert "--store late: needs --engine-gb" in capsys.readouterr().err
