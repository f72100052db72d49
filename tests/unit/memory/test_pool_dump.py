"""`kvstrata ctl pool dump`: what it shows of a pool, that it changes nothing, and how it shows damage."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import ctl
from kvstrata.errors import SegmentError
from kvstrata.memory import linux
from kvstrata.memory.pool_dump import dump
from kvstrata.memory.segment import Segment, SegmentSettings
from tests.harness.amount import amount

MIB = 1 << 20
RECORD = 8192
KEYS = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(4))
IDENTITY = hashlib.sha256(b"identity").digest()
TENANT = 7
SESSION, GROUP = b"s" * 16, b"g" * 16
HOT_BYTES = 64


@pytest.fixture
def segment(settings: SegmentSettings) -> Iterator[Segment]:
    """A pool with three READY chunks, one of them leased, and one RESERVED, all of one engine process."""
    found = Segment.open(settings)
    row = found.pool.claim_row(SESSION, GROUP, 4711)
    ticket, _, _ = found.pool.reserve(KEYS, b"", RECORD, row, IDENTITY, TENANT)
    found.pool.commit(ticket, [0, 1, 2], check=False)
    found.pool.lease(KEYS[:32], 1, [row])
    yield found
    found.close()


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """By file name: bytes, allocated blocks, time of the last change."""
    found = {}
    for path in folder.iterdir():
        status = path.stat()
        found[path.name] = (path.read_bytes(), status.st_blocks, status.st_mtime_ns)
    return found


def sums(entries: int) -> dict[str, int]:
    return {"entries": entries, "bytes": entries * RECORD}


def test_a_dump_shows_header_rows_and_entries(settings: SegmentSettings, segment: Segment) -> None:
    told = dump(settings.directory, entries=True)
    assert (told["pool_id"], told["epoch"]) == (segment.pool.pool_id.hex(), segment.pool.epoch)
    assert (told["extents_bytes"], told["entry_capacity"]) == (4 * MIB, 64)
    assert told["server"] == {"running": True, "pid_file": str(os.getpid())}
    assert told["extents_file"]["bytes"] == 4 * MIB and not told["extents_file"]["problem"]
    assert [run["extent_bytes"] for run in told["runs"]] == [RECORD]
    assert told["states"] == [{"state": "ready", **sums(3)}, {"state": "reserved", **sums(1)}]
    assert told["sizes"] == [{"record_bytes": RECORD, **sums(4)}]
    assert told["tenants"] == [{"tenant": TENANT, **sums(4)}]
    assert told["identities"] == [{"identity": IDENTITY[:16].hex(), **sums(4)}]
    assert told["leases"] == sums(1)
    assert told["damaged_entries"] == told["changing_entries"] == 0
    row = next(row for row in told["rows"] if row["row"])
    assert row["session"] == SESSION.hex() and row["group"] == GROUP.hex() and row["pid"] == 4711
    assert (row["lock"], row["may_touch_entries"], row["reserved_entries"]) == ("free", 1, 1)
    assert {entry["key"] for entry in told["every_entry"]} == {
        KEYS[at : at + 32].hex() for at in range(0, 128, 32)
    }
    chain = {entry["key"]: entry for entry in told["every_entry"]}
    first, second = chain[KEYS[:32].hex()], chain[KEYS[32:64].hex()]
    assert first["parent"] is None and second["parent"] == first["entry"]
    assert first["row_bits"] == [row["row"]] and second["row_bits"] == []


def test_a_dump_changes_nothing_and_the_next_server_adopts_the_pool(
    settings: SegmentSettings, segment: Segment
) -> None:
    before = contents(settings.directory)
    dump(settings.directory, entries=True)
    after = contents(settings.directory)
    assert after == before
    pool_id = segment.pool.pool_id
    segment.close()
    told = dump(settings.directory)
    assert told["server"]["running"] is False
    with open(settings.directory / "index", "r+b") as index:
        assert linux.lock_whole_file(index.fileno())
    again = Segment.open(settings)
    assert again.adopted and again.pool.pool_id == pool_id
    again.close()


def test_a_dump_allocates_no_memory_for_holes(
    tmp_path: Path, settings: SegmentSettings, segment: Segment
) -> None:
    index = tmp_path / "index"
    whole = (settings.directory / "index").read_bytes()
    with open(index, "wb") as file:
        file.write(whole[:4096])
        file.truncate(len(whole))
    blocks = index.stat().st_blocks
    assert dump(index)["states"] == []
    assert index.stat().st_blocks == blocks


def test_an_index_without_its_extents_can_be_dumped(settings: SegmentSettings, segment: Segment) -> None:
    told = dump(settings.directory / "index")
    assert "extents_file" not in told and told["states"][0] == {"state": "ready", **sums(3)}
    assert {row["lock"] for row in told["rows"] if row["row"]} == {"unknown"}


def test_extents_of_another_size_are_reported(
    settings: SegmentSettings, segment: Segment, tmp_path: Path
) -> None:
    shutil.copy(settings.directory / "index", tmp_path)
    (tmp_path / "extents").write_bytes(bytes(4096))
    assert dump(tmp_path)["extents_file"]["problem"] == f"the index is for {4 * MIB} bytes"
    (tmp_path / "extents").unlink()
    assert "no such file" in dump(tmp_path)["extents_file"]["problem"]


def entry_at(index: bytes, key: bytes) -> int:
    """Offset of a key's hot entry in an index file."""
    return index.index(key) - 8


@pytest.mark.parametrize(
    ("at", "value", "problem"),
    [
        (4, b"\x09", "no such state"),
        (40, (100).to_bytes(8, "little"), "offset is not a multiple of 4096"),
        (40, (4 * MIB).to_bytes(8, "little"), "leaves the extents"),
        (48, bytes(4), "no length"),
    ],
)
def test_a_damaged_entry_is_named(
    settings: SegmentSettings, segment: Segment, tmp_path: Path, at: int, value: bytes, problem: str
) -> None:
    index = bytearray((settings.directory / "index").read_bytes())
    place = entry_at(bytes(index), KEYS[32:64]) + at
    index[place : place + len(value)] = value
    (tmp_path / "index").write_bytes(index)
    told = dump(tmp_path / "index")
    assert told["damaged_entries"] == 1
    assert [row["problem"] for row in told["damaged"]] == [problem]


def fails(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """The command fails with one line on standard error; returns it."""
    assert ctl.main(["pool", "dump", str(path)]) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1 and shown.err.startswith("kvstrata ctl: ")
    return shown.err


def test_files_that_are_no_pool_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], settings: SegmentSettings, segment: Segment, tmp_path: Path
) -> None:
    whole = (settings.directory / "index").read_bytes()
    (tmp_path / "short").write_bytes(whole[:-1])
    (tmp_path / "empty").touch()
    (tmp_path / "foreign").write_bytes(bytes(len(whole)))
    version = bytearray(whole)
    version[8] += 1
    (tmp_path / "newer").write_bytes(version)
    os.mkfifo(tmp_path / "fifo")
    assert "index_file_bytes" in fails(capsys, tmp_path / "short")
    assert "index_file_bytes" in fails(capsys, tmp_path / "empty")
    assert "magic" in fails(capsys, tmp_path / "foreign")
    assert "format_version" in fails(capsys, tmp_path / "newer")
    assert "not a regular file" in fails(capsys, tmp_path / "fifo")
    assert "no such file" in fails(capsys, tmp_path)
    assert "no such file" in fails(capsys, tmp_path / "nothing")


def test_refused_files_name_their_owner_and_mode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").touch(mode=0o600)

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvstrata.memory.pool_dump.os.open", refuse)
    assert f"has uid {os.geteuid()} and mode 0600, run it as that user" in fails(capsys, tmp_path)


def test_a_corrupted_index_is_dumped_or_refused_and_never_crashes(
    settings: SegmentSettings, segment: Segment, tmp_path: Path
) -> None:
    whole = (settings.directory / "index").read_bytes()
    index = tmp_path / "index"
    refused = told = 0
    for seed in range(amount(80, 300)):
        draw = random.Random(seed)
        damaged = bytearray(whole)
        # The static header has a checksum, so most seeds damage only what follows it.
        first = draw.choice([0, 64, 64, 128, 4096, len(whole) - 2 * 64 * HOT_BYTES])
        for _ in range(draw.choice([1, 8, 200])):
            damaged[draw.randrange(first, len(whole))] = draw.randrange(256)
        if draw.random() < 0.2:
            damaged = damaged[: draw.randrange(len(damaged))]
        if draw.random() < 0.2:
            damaged[64:4096] = draw.randbytes(4096 - 64)
        index.write_bytes(damaged)
        try:
            json.dumps(dump(index, entries=True))
            told += 1
        except SegmentError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert refused and told


def test_an_index_that_becomes_shorter_meanwhile_is_refused(
    settings: SegmentSettings, segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.write_bytes((settings.directory / "index").read_bytes())

    def cut(*_: Any) -> dict[str, Any]:
        os.truncate(index, 4096)
        return {}

    monkeypatch.setattr("kvstrata.memory.pool_dump._server", cut)
    with pytest.raises(SegmentError, match="became shorter"):
        dump(index)


def test_a_live_pool_can_be_dumped_while_it_changes(settings: SegmentSettings, segment: Segment) -> None:
    for step in range(50):
        segment.pool.remove(KEYS[32:96])
        ticket, _, _ = segment.pool.reserve(KEYS[32:96], KEYS[:32], RECORD, 1, IDENTITY, TENANT)
        told = dump(settings.directory)
        assert told["damaged_entries"] == 0, step
        segment.pool.commit(ticket, [0, 1], check=False)


def test_the_command_prints_tables_or_json(
    capsys: pytest.CaptureFixture[str], settings: SegmentSettings, segment: Segment
) -> None:
    assert ctl.main(["pool", "dump", str(settings.directory)]) == 0
    shown = capsys.readouterr().out
    assert "ready" in shown and SESSION.hex() in shown
    for arguments in (["--json", "pool", "dump"], ["pool", "dump", "--json"]):
        assert ctl.main([*arguments, str(settings.directory)]) == 0
        assert json.loads(capsys.readouterr().out)["states"][0]["entries"] == 3
