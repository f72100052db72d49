"""Calls by which a test lets a worker process (`attach_worker`) attach and asks the `attach_server` about its pool."""

from __future__ import annotations

import base64
import functools
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.rpc.wire import AttachReply
from tests.harness.attach_server import Place
from tests.harness.attach_worker import make_request
from tests.harness.cache_engine import eventually
from tests.harness.child import Child

RECORD_BYTES = 8192


def new_worker(log: Path, under: tuple[str, ...] = ()) -> Child:
    """Start a process that can attach; `under` is a command that runs it, such as one that makes namespaces."""
    return Child("tests.harness.attach_worker", under=under, log=log)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def session_name(text: str) -> str:
    """Return a session's 16 bytes in base64, as both processes take them."""
    return b64(text.encode().ljust(16, b"."))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


until = functools.partial(eventually, "the condition holds")


def attach(worker: Child, place: Place, session: str, **request: Any) -> int:
    """Let the worker attach; return its row. `request` has fields of the attach request."""
    row: int = worker.ask("attach", socket_dir=str(place.socket_dir), session=session, **request)
    return row


def rows_of(server: Child) -> dict[int, bool]:
    """Return each row in use, and whether the row dates from before the server's restart."""
    return {row["row"]: row["old"] for row in server.ask("rows")}


def pool_bytes(server: Child, state: str) -> int:
    """Return the pool's `{state}_bytes`, such as `quarantined_bytes`."""
    found: int = server.ask("stats")["pool"][f"{state}_bytes"]
    return found


def reserve(server: Child, row: int, *numbers: int) -> dict[str, Any]:
    """Reserve an extent for each key number; assert that each is granted; return the reservation."""
    keys = b"".join(key(number) for number in numbers)
    found: dict[str, Any] = server.ask("reserve", row=row, keys=b64(keys), record_bytes=RECORD_BYTES)
    assert found["outcomes"] == [0] * len(numbers)
    return found


def raw_reply(worker: Child, place: Place, messages: list[bytes], fds: list[str]) -> AttachReply:
    """Let the worker send `messages` as they are, the first with `fds`; return the reply to the last."""
    replies = worker.ask(
        "raw", socket_dir=str(place.socket_dir), messages=[b64(m) for m in messages], fds=fds
    )
    return msgspec.msgpack.decode(base64.b64decode(replies[-1]), type=AttachReply)


def encoded_request(**change: Any) -> bytes:
    """Return an encoded attach request of session `raw`, with some fields changed."""
    arguments: dict[str, Any] = {"session": b"raw".ljust(16, b".")}
    fields = {k: v for k, v in change.items() if k in ("slice", "facts", "engine_slices")}
    arguments.update({k: v for k, v in change.items() if k not in fields})
    return msgspec.msgpack.encode(msgspec.structs.replace(make_request(**arguments), **fields))


GOOD_REQUEST = encoded_request()
