"""The dashboard over a real controller and a real server, in real Chromium."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from kvstrata.native.hashing import chain_keys
from kvstrata.rpc.cluster_wire import tags_of
from kvstrata.types import shown_name
from tests.harness import chromium, etcd_server, page_checks
from tests.harness.cache_engine import eventually
from tests.harness.cluster_instance import ClusterInstance
from tests.harness.controller_process import ControllerProcess
from tests.harness.etcd_server import EtcdServer
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient
from tests.harness.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

QUICK = ("--heartbeat-s", "0.2", "--dead-after-s", "2")
PATIENT = ("--heartbeat-s", "600", "--dead-after-s", "1200")
"""No instance dies in these tests, though each sends one heartbeat at most."""
CHUNKS = 20


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
    async with chromium.visit(browser, f"{controller.url}/", link=controller.dashboard_link()) as page:
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
                "#/instances/ours/workers": shown_name(client.session)[:12],
                "#/instances/ours/runtime": "MainThread",
                "#/tiers": "fs-0",
                "#/events": "synced",
                "#/metrics": "kvstrata_controller_",
                "#/": "placements in",
            }.items():
                await page.evaluate("(hash) => { location.hash = hash; }", path)
                await expect(page.locator("main")).to_contain_text(text)
                assert await page_checks.faults(page) == [], path


@pytest.mark.long
async def test_page_asks_for_a_login_takes_the_token_too_and_then_acts(
    browser: Browser, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("t" * 32)
    flags = (*PATIENT, "--token-file", str(token))
    with ControllerProcess(tmp_path / "controller", flags=flags) as controller:
        url = f"{controller.url}/#/instances"
        with ClusterInstance(controller.ports["reply"], "told") as instance:
            instance.join({})
            async with chromium.visit(browser, url, unanswered=True, live=False) as page:
                await expect(page.get_by_role("dialog")).to_contain_text(
                    "kvstrata ctl cluster dashboard-link"
                )
                assert await page_checks.faults(page) == []
                field = page.get_by_label("Link, or the controller")
                await field.fill("u" * 32)
                await page.keyboard.press("Enter")
                await expect(page.get_by_role("alert")).to_contain_text("unknown, used before or too old")
                await expect(page.get_by_role("row", name="told")).to_have_count(0)
                await field.fill("t" * 32)
                await page.keyboard.press("Enter")
                await expect(page.locator("#connection.live")).to_be_visible()
                await page.get_by_role("button", name="Drain told").click()
                await page.get_by_role("alertdialog").get_by_role("button", name="Drain").click()
                await expect(page.get_by_role("row", name="told")).to_contain_text("draining")
                assert "t" * 32 not in await page.evaluate(
                    "JSON.stringify([{...localStorage}, document.cookie])"
                )
        assert controller.ask("/v1/instances/told", token="t" * 32)["draining"]


@pytest.mark.long
async def test_page_of_a_follower_names_the_leader_and_finds_chunks_without_it(
    browser: Browser, tmp_path: Path
) -> None:
    try:
        etcd_server.ensure()
    except etcd_server.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(tmp_path / "etcd"))
        config = tmp_path / "controller.yaml"
        config.write_text(etcd.controllers_settings(tmp_path, 2))
        flags = (*PATIENT, "--config", str(config))
        leader, follower = (
            stack.enter_context(ControllerProcess(tmp_path / name, flags=(*flags, "--name", name)))
            for name in ("first", "second")
        )
        eventually("the first leads", lambda: follower.ask("/v1/cluster")["election"]["leader"] == "first")
        one = stack.enter_context(ClusterInstance(follower.ports["reply"], "told"))
        key = "ab" * 32
        one.join({"l1": tags_of(bytes.fromhex(key))})
        url, to_log_in = f"{follower.url}/#/instances", follower.dashboard_link()
        async with chromium.visit(browser, url, link=to_log_in) as page:
            note = page.locator(".note")
            await expect(note).to_contain_text("This controller does not lead")
            link = note.get_by_role("link", name="first")
            await expect(link).to_have_attribute("href", f"http://localhost:{leader.http_port}")
            assert await page_checks.faults(page) == []
            await page.evaluate("() => { location.hash = '#/explorer'; }")
            await page.get_by_role("button", name="Storage keys").click()
            await page.get_by_role("textbox", name="Storage keys").fill(f"{key} {'cd' * 32}")
            await page.get_by_role("button", name="Look up").click()
            await expect(page.locator(".verdict")).to_contain_text("The first 1 of 2 chunks are there")
            await expect(page.locator("main")).to_contain_text(
                "this controller does not lead; first leads, at"
            )


@pytest.mark.long
async def test_server_is_drained_removed_and_allowed_again(
    browser: Browser, controller: ControllerProcess, server: ServerProcess
) -> None:
    server.start()
    url, link = f"{controller.url}/#/instances", controller.dashboard_link()
    async with chromium.visit(browser, url, link=link) as page:
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


@pytest.mark.long
async def test_killed_server_dies_on_the_page_and_a_killed_controller_is_missed_until_it_is_back(
    browser: Browser, controller: ControllerProcess, server: ServerProcess
) -> None:
    server.start()
    url, link = f"{controller.url}/#/instances", controller.dashboard_link()
    async with chromium.visit(browser, url, unanswered=True, link=link) as page:
        row = page.get_by_role("row", name="ours")
        await expect(row).to_contain_text("ready")
        server.kill()
        await expect(row).to_contain_text("dead")
        await page.get_by_role("link", name="Events", exact=True).click()
        await expect(page.locator(".log")).to_contain_text("died")
        controller.kill()
        await expect(page.get_by_role("alert")).to_contain_text("Connection lost at")
        controller.start()  # which has ended all sessions
        await page.get_by_label("Link, or the controller").fill(controller.dashboard_link())
        await page.keyboard.press("Enter")
        await expect(page.locator("#connection.live")).to_be_visible()
        await expect(page.get_by_role("alert")).to_have_count(0)
