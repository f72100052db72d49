"""The dashboard over a real controller and a real server, in real Chromium: each page and an action."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from kvstrata.native.core import chain_keys
from kvstrata.types import shown_name
from tests.harness import chromium, page_checks
from tests.harness.controller_process import ControllerProcess
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient, until
from tests.harness.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

QUICK = ("--heartbeat-s", "0.2")
CHUNKS = 70  # fewer tell no forecast


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


async def test_server_is_seen_from_its_first_word_and_drained(
    browser: Browser, controller: ControllerProcess, server: ServerProcess
) -> None:
    async with chromium.visit(browser, f"{controller.url}/", link=controller.dashboard_link()) as page:
        line = f"lmcache-server --controller-url tcp://127.0.0.1:{controller.ports['reply']}"
        await expect(page.locator(".empty")).to_contain_text(line)
        server.start()
        await expect(page.locator(".tile", has_text="Instances")).to_contain_text("all up to date")
        await page.get_by_role("link", name="Instances", exact=True).click()
        row = page.get_by_role("row", name="ours")
        await expect(row).to_contain_text("ready")
        with RpcClient(server.socket_dir) as client:
            identity = client.identify()
            tokens = [7] * (CHUNKS * CHUNK_TOKENS)
            chain = chain_keys(identity.root, tokens, CHUNK_TOKENS)
            client.store(identity, chain)
            blue = client.identify(tenant="blue")
            of_blue = chain_keys(blue.root, tokens[: 2 * CHUNK_TOKENS], CHUNK_TOKENS)
            client.store(blue, of_blue)
            client.lookup(blue.identity_id, of_blue)
            until(
                client,
                lambda status: (
                    client.lookup(identity.identity_id, chain).n_chunks and status["pool"]["forecast_seconds"]
                ),
            )
            await expect(row.locator('[data-title="Chunks"]')).to_have_text(str(2 * (CHUNKS + 2)))
            for path, texts in {
                "#/instances/ours": (client.layout.model, shown_name(client.session)[:12], "MainThread"),
                "#/events": ("listed",),
                "#/": ("placements in", "fs-0"),
            }.items():
                await page.evaluate("(hash) => { location.hash = hash; }", path)
                for text in texts:
                    await expect(page.locator("main")).to_contain_text(text)
                if path == "#/instances/ours":
                    forecast = page.get_by_role("row", name="128 MiB (2 ×)")
                    await expect(forecast.locator('[data-title="Chunks found"]')).to_contain_text("%")
                    shares = page.get_by_role("row", name="blue")
                    await expect(shares.locator('[data-title="L1"]')).to_contain_text("KiB")
                assert await page_checks.faults(page) == [], path
            await page.evaluate("() => { location.hash = '#/instances'; }")
            await page.get_by_role("button", name="Drain ours").click()
            await page.get_by_role("alertdialog").get_by_role("button", name="Drain").click()
            await expect(row).to_contain_text("draining")
            shutil.rmtree(server.folder / "l2")
            await page.evaluate("() => { location.hash = '#/'; }")
            await expect(page.locator("main")).to_contain_text("fs-0 is gone")
