"""`kvstrata l2 rewrite` on real directories."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import main
from kvstrata.clock import SystemClock
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.stack import innermost
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.testing.adapter_contract import LOADED, SIZE, STORED
from kvstrata.testing.strategies import key_of, load_item, put_item

NUMBERS = range(1, 8)


def key_file(folder: Path, name: str) -> str:
    path = folder / name
    path.touch(0o600)
    path.write_text(name * 32)
    return str(path)


async def opened(entry: dict[str, Any]) -> CodecAdapter:
    adapter = innermost(configure_tier(entry, 0).recipe)
    await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
    return adapter


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    lines = capsys.readouterr().out.splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("disk", "aes-gcm"),
        *(
            pytest.param(*rare, marks=pytest.mark.long)
            for rare in (("fs", "aes-gcm"), ("fs", "mac"), ("disk", "mac"))
        ),
    ],
)
async def test_after_a_rewrite_the_old_key_is_needed_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, codec: str
) -> None:
    old, new = key_file(tmp_path, "old-key"), key_file(tmp_path, "new-key")
    entry = {"type": kind, "base_path": str(tmp_path / "kv"), "capacity_gb": 0.25 if kind == "disk" else 1}
    with_old = {**entry, "codec": ["zstd", {"name": codec, "key_file": old}]}
    with_both = {**entry, "codec": ["zstd", {"name": codec, "key_files": [new, old]}]}
    with_new = {**entry, "codec": ["zstd", {"name": codec, "key_file": new}]}
    adapter = await opened(with_old)
    assert await adapter.put([put_item(key_of(n), SIZE) for n in NUMBERS]) == [STORED] * len(NUMBERS)
    await adapter.close()
    adapter = await opened(with_both)
    assert await adapter.delete([key_of(1)]) == 1
    assert await adapter.put([put_item(key_of(1), SIZE)]) == [STORED]
    await adapter.close()

    assert await asyncio.to_thread(main, ["l2", "rewrite", json.dumps(with_new)]) == 1
    assert printed(capsys) == {"wrong_key": len(NUMBERS) - 1, "current": 1}
    assert await asyncio.to_thread(main, ["l2", "rewrite", json.dumps(with_both)]) == 0
    assert printed(capsys) == {"rewritten": len(NUMBERS) - 1, "current": 1}
    assert await asyncio.to_thread(main, ["l2", "rewrite", json.dumps(with_both)]) == 0
    assert printed(capsys) == {"current": len(NUMBERS)}

    adapter = await opened(with_new)
    assert await adapter.load([load_item(key_of(n), SIZE) for n in NUMBERS]) == [LOADED] * len(NUMBERS)
    await adapter.close()


def test_what_cannot_be_rewritten_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = {"type": "fs", "base_path": str(tmp_path / "kv"), "capacity_gb": 1}
    objects = {"type": "object_store", "url": f"file://{tmp_path}/objects"}
    seal = [{"name": "mac", "key_file": key_file(tmp_path, "new-key")}]
    for entry, wrong in (
        ({**folder, "codec": "zstd"}, "names no key to write with; give aes-gcm or mac with key_files"),
        ({**objects, "codec": seal}, "this kind of storage cannot list its records"),
        (
            {**folder, "codec": [{"name": "mac", "key_files": []}]},
            r"JSON.codec[0].key_files: must be a list of",
        ),
    ):
        assert main(["l2", "rewrite", json.dumps(entry)]) == 2
        assert wrong in capsys.readouterr().err
