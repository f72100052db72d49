"""The dashboard over a real controller and a real server, in real Chromium."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from kvstrata.native.hashing import chain_keys
from tests.harness import chromium, page_checks
from tests.harness.controller_process import ControllerProcess
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient
from tests.harness.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

QUICK = ("--heartbeat-s", "0.2", "--dead-after-s", "2")
CHUNKS = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    try:
        async with chromium.browser() as running:
            yield running
    except chromium.Unavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path / "controller", flags=QUICK) as process:
        yield process


@pytest.fixture
def server(tmp_path: Path, controller: ControllerProcess) -> Iterator[ServerProcess]:
    """Not started yet."""
    url = f"tcp://127.0.0.1:{controller.ports['reply']}"
    flags = ("--controller-url", url, "--instance-id", "ours")
    with ServerProcess(
        tmp_path / "server", l1_mb=64, l2="fs", chunk_tokens=CHUNK_TOKENS, flags=flags
    ) as process:
        yield process


async def test_server_is_seen_from_its_first_word_to_a_request_that_missed(
    browser: Browser, controller: ControllerProcess, server: ServerProcess
) -> None:
    async with chromium.visit(browser, f"{controller.url}/") as page:
        line = f"lmcache-server --controller-url tcp://127.0.0.1:{controller.ports['reply']}"
        await expect(page.locator(".empty")).to_contain_text(line)
        server.start()
        await expect(page.locator(".tile", has_text="Instances")).to_contain_text("all in sync")
        await page.get_by_role("link", name="Instances", exact=True).click()
        row = page.get_by_role("row", name="ours")
        await expect(row).to_contain_text("ready")
        with RpcClient(server.socket_dir) as client:
            identity = client.identify()
            tokens = [7] * (CHUNKS * CHUNK_TOKENS)
            client.store(identity, chain_keys(identity.root, tokens, CHUNK_TOKENS))
            await expect(row.locator('[data-title="Chunks"]')).to_have_text(str(2 * CHUNKS))

            await page.get_by_role("link", name="Explorer", exact=True).click()
            await page.get_by_label("Token ids of the prompt").fill(str([*tokens, *[8] * CHUNK_TOKENS]))
            await page.get_by_role("button", name="Look up").click()
            await expect(page.locator(".verdict")).to_contain_text(
                f"The first {CHUNKS} of {CHUNKS + 1} chunks are there"
            )
            await expect(page.locator(".strips")).to_contain_text(f"first {CHUNKS} of {CHUNKS + 1}")

            absent = chain_keys(identity.root, [9] * CHUNK_TOKENS, CHUNK_TOKENS)
            client.lookup(identity.identity_id, absent, request_id="cmpl-9")
            await page.get_by_role("button", name="Request id").click()
            await page.get_by_label("Request id", exact=True).fill("cmpl-9")
            await page.get_by_role("button", name="Explain").click()
            await expect(page.locator(".verdict")).to_contain_text("0 of 1 chunks served")
            await expect(page.locator(".verdict")).to_contain_text(re.compile("unknown_key|never_stored"))

            for path, text in {
                "#/instances/ours": client.layout.model,
                "#/instances/ours/workers": client.session.hex()[:12],
                "#/instances/ours/runtime": "MainThread",
                "#/tiers": "fs-0",
                "#/events": "synced",
                "#/metrics": "kvstrata_controller_",
                "#/": "placements in",
            }.items():
                await page.evaluate("(hash) => { location.hash = hash; }", path)
                await expect(page.locator("main")).to_contain_text(text)
                assert await page_checks.faults(page) == [], path


async def test_server_is_drained_removed_and_allowed_again(
    browser: Browser, controller: ControllerProcess, server: ServerProcess
) -> None:
    server.start()
    async with chromium.visit(browser, f"{controller.url}/#/instances") as page:
        row = page.get_by_role("row", name="ours")
        await page.get_by_role("button", name="Drain ours").click()
        await page.get_by_role("alertdialog").get_by_role("button", name="Drain").click()
        await expect(page.locator(".toast")).to_contain_text("ours is draining.")
        await expect(row).to_contain_text("draining")
        await page.get_by_role("button", name="End draining ours").click()
        await page.get_by_role("alertdialog").get_by_role("button", name="End draining").click()
        await expect(row).to_contain_text("ready")
        await page.get_by_role("button", name="Remove ours").click()
        await page.get_by_role("alertdialog").get_by_role("button", name="Remove").click()
        await expect(row).to_have_count(0)
        await page.get_by_role("button", name="Allow ours").click()
        await expect(row).to_contain_text("ready")


async def test_killed_server_dies_on_the_page_and_a_killed_controller_is_missed_until_it_is_back(
    browser: Browser, controller: ControllerProcess, server: ServerProcess
) -> None:
    server.start()
    async with chromium.visit(browser, f"{controller.url}/#/instances", unanswered=True) as page:
        row = page.get_by_role("row", name="ours")
        await expect(row).to_contain_text("ready")
        server.kill()
        await expect(row).to_contain_text("dead")
        await page.get_by_role("link", name="Events", exact=True).click()
        await expect(page.locator(".log")).to_contain_text("died")
        controller.kill()
        await expect(page.get_by_role("alert")).to_contain_text("Connection lost at")
        controller.start()
        await expect(page.locator("#connection.live")).to_be_visible()
        await expect(page.get_by_role("alert")).to_have_count(0)
