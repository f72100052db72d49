"""The book of identities: what was noted is known after a restart, whatever is in the file."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import pytest

from kvstrata.errors import StorageError
from kvstrata.process.lane import PoolLane
from kvstrata.process.supervisor import Supervisor
from kvstrata.server.identity_book import LINE_BYTES, MAGIC, IdentityBook, book_path, tenant_mark
from tests.harness.amount import amount

pytestmark = pytest.mark.asyncio


def root(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def opened(path: Path | None, limit: int = 1000) -> IdentityBook:
    loop = asyncio.get_running_loop()
    return IdentityBook(path, PoolLane(loop, threads=1, queue=None), Supervisor(loop), limit)


async def noted(path: Path, numbers: range, tenant: str = "blue", limit: int = 1000) -> dict[bytes, bytes]:
    """Note roots in a book of its own, and read them all."""
    book = opened(path, limit)
    for number in numbers:
        book.note(root(number), tenant)
    return await book.roots()


async def test_a_root_is_known_with_its_tenant_after_a_restart_and_names_are_not_in_the_file(tmp_path):
    path = tmp_path / "kvstrata" / "identities" / "one"
    await noted(path, range(5), "blue")
    await noted(path, range(3, 8), "")
    known = await opened(path).roots()
    assert known == {root(n): tenant_mark("blue" if n < 3 else "") for n in range(8)}, "the later line holds"
    content = path.read_bytes()
    assert len(content) == len(MAGIC) + 10 * LINE_BYTES and b"blue" not in content
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("seed", range(amount(6, 20)))
async def test_damage_costs_the_damaged_lines_alone_and_later_lines_are_kept(tmp_path, seed):
    draw = random.Random(seed)
    path = tmp_path / "book"
    await noted(path, range(10))
    content = bytearray(path.read_bytes())
    cut = draw.randrange(len(MAGIC), len(content) + 1)
    del content[cut:]
    flipped = draw.randrange(len(MAGIC), cut) if cut > len(MAGIC) else None
    if flipped is not None:
        content[flipped] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    whole = set(range((cut - len(MAGIC)) // LINE_BYTES))
    if flipped is not None:
        whole.discard((flipped - len(MAGIC)) // LINE_BYTES)
    await noted(path, range(100, 105))
    assert await opened(path).roots() == {root(n): tenant_mark("blue") for n in (*whole, *range(100, 105))}, (
        seed
    )


@pytest.mark.parametrize(
    "content", [b"", b"KV", b"something else that is longer than one line of a book of ours" * 9]
)
async def test_a_file_that_is_no_book_is_written_anew(tmp_path, content):
    path = tmp_path / "book"
    path.write_bytes(content)
    await noted(path, range(3))
    assert (await opened(path).roots()).keys() == {root(n) for n in range(3)}


async def test_the_oldest_roots_are_forgotten_at_the_limit(tmp_path):
    path = tmp_path / "book"
    for first in range(1, 100, 5):
        await noted(path, range(first, first + 5), limit=20)
        await noted(path, range(1), limit=20)  # declared again and again, so it is never among the oldest
        assert path.stat().st_size <= len(MAGIC) + 2 * 20 * LINE_BYTES
        known = list(await opened(path, 20).roots())
        assert known == [*(root(n) for n in range(max(1, first - 14), first + 5)), root(0)]


async def test_a_root_that_is_declared_again_and_again_is_written_once(tmp_path):
    book = opened(tmp_path / "book")
    for number in (1, 2, 1, 2, 1):
        book.note(root(number), "blue")
        assert root(number) in await book.roots()
    assert (tmp_path / "book").stat().st_size == len(MAGIC) + 2 * LINE_BYTES


async def test_a_folder_that_cannot_be_written_is_named_when_the_tenants_are_asked_for(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"tenants of records are not known: .*/file/book"):
        await noted(tmp_path / "file" / "book", range(3))
    assert "cannot be cleared of single tenants" in caplog.text


async def test_without_a_folder_for_state_nothing_is_kept(tmp_path):
    assert book_path("one", {"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "kvstrata/identities/one"
    book = opened(None)
    book.note(root(1), "blue")
    with pytest.raises(StorageError, match="XDG_STATE_HOME"):
        await book.roots()
