"""The rows that show an operator the tiers and what a restart changes, without secrets."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstrata.config.secrets import SECRET_LEFT_OUT, shown
from kvstrata.storage.entry import configure_tier
from tests.fault.server.tier_rig import Start
from tests.harness.l1 import LATER_S
from tests.harness.shelf import SHELVES, entry
from tests.harness.waiting import until


async def test_rows_tell_which_tiers_a_restart_keeps_and_brings_back(start: Start) -> None:
    rig = start()
    for number, shelf in enumerate(("a", "b")):
        await rig.control.open(configure_tier(entry(shelf), number))
    added = await rig.add("c", position=0)

    async def in_settings() -> dict[str, bool]:
        return {row["name"]: row["in_settings"] for row in await rig.control.rows.all()}

    assert await in_settings() == {added: False, "plugin-0": True, "plugin-1": True}
    assert rig.control.rows.missing() == []
    row = (await rig.control.rows.all())[0]
    assert row["entry"] == {**entry("c"), "adapter_params": {"shelf": SECRET_LEFT_OUT}}, "a text nobody knows"
    assert row["secrets_left_out"] == ["adapter_params.shelf"]
    await rig.control.remove("plugin-0", wait_s=LATER_S)
    assert rig.control.rows.missing() == ["plugin-0"]
    again = await rig.add("a")
    assert rig.control.rows.missing() == [], "the same entry is in service under another name"
    assert await in_settings() == {added: False, "plugin-1": True, again: True}
    SHELVES["b"].shut("close")
    removing = asyncio.create_task(rig.control.remove("plugin-1", wait_s=0.0))
    await until(lambda: rig.states()["plugin-1"] == "removing")
    assert rig.control.rows.missing() == ["plugin-1"]
    SHELVES["b"].let_go()
    await removing


async def test_a_tier_that_leaves_while_others_are_asked_still_has_its_row(start: Start) -> None:
    rig = start()
    gone, other = await rig.add("a"), await rig.add("b")
    asked, answer = asyncio.Event(), asyncio.Event()
    usage = rig.adapters.get(other).adapter.usage

    async def slow() -> Any:
        asked.set()
        await answer.wait()
        return await usage()

    rig.adapters.get(other).adapter.usage = slow
    listing = asyncio.create_task(rig.control.rows.all())
    await asked.wait()
    await rig.control.remove(gone, wait_s=LATER_S)
    answer.set()
    assert [(row["name"], row["state"]) for row in await listing] == [(gone, "removing"), (other, "active")]
    assert [row["name"] for row in await rig.control.rows.all()] == [other]


def test_an_entry_is_shown_without_its_secrets() -> None:
    given = {
        "type": "any",
        "password": "hunter2",
        "token_file": "/run/token",
        "codec": [{"name": "aes-gcm", "key_file": "/run/key"}],
        "adapter_params": {"Secret_Access_Key": "x", "bucket": "b", "password": ""},
        "chunk_tokens": 256,
        "auth": [{"apikey": "x"}, "y"],
    }
    public, left_out = shown(given)
    assert left_out == ["password", "adapter_params.Secret_Access_Key", "auth[0].apikey", "auth[1]"]
    assert public == {
        **given,
        "password": SECRET_LEFT_OUT,
        "adapter_params": {"Secret_Access_Key": SECRET_LEFT_OUT, "bucket": "b", "password": ""},
        "auth": [{"apikey": SECRET_LEFT_OUT}, SECRET_LEFT_OUT],
    }
    assert given["password"] == "hunter2"


def test_no_secret_of_an_object_store_is_shown() -> None:
    """A text under a name that nobody knows is a secret, and so is the password of an address."""
    for name, value in (
        ("secret_access_key", "hunter2"),
        ("an_option_of_the_next_version", "hunter2"),
        ("proxy_url", "http://me:hunter2@proxy:3128"),
        ("endpoint", "https://:hunter2@host"),
    ):
        public, left_out = shown(
            {"type": "object_store", "url": "s3://bucket/kv", name: value, "max_retries": 3}
        )
        assert left_out == [name] and "hunter2" not in str(public)
    for url in ("http://proxy:3128", "s3://bucket/a:b@c", "https://me@host"):
        assert shown({"proxy_url": url, "key_prefix": "kv:"}) == ({"proxy_url": url, "key_prefix": "kv:"}, [])
