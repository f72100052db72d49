"""The gateway's dashboard in real Chromium, before a real gateway: pages, logging in, hostile names, large fleets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from tests.harness import chromium, page_checks
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import ScriptedEngine
from tests.integration.gateway.conftest import client, starting
from tests.integration.gateway.test_faults import at_rest
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

PHONE = (390, 844)
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
FIELD = "Link, or the gateway"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    try:
        async with chromium.browser() as running:
            yield running
    except chromium.Unavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with client() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tmp_path_factory: pytest.TempPathFactory, session: aiohttp.ClientSession
) -> AsyncIterator[GatewayProcess]:
    """A gateway before two engines that has answered seven requests, one of them with hostile names."""
    slo = [{"name": "chat", "ttft_ms": 60_000}, {"name": "never", "ttft_ms": 0.001}]
    async with starting(tmp_path_factory.mktemp("gateway")) as start:
        engines = ScriptedEngine("m", HOSTILE), ScriptedEngine("m")
        running = await start(*engines, policy="ttft", slo=slo)
        for number in range(7):
            name = f"turn/{number}" if number else HOSTILE
            headers = {"X-SLO-Class": "chat" if number else "never", "X-Request-ID": name}
            body = {**ask(), "model": "m" if number else HOSTILE}
            async with session.post(running.url + CHAT, json=body, headers=headers) as response:
                assert response.status == 200
        await at_rest(running, session)
        yield running


async def link_of(gateway: GatewayProcess, session: aiohttp.ClientSession) -> str:
    """A link that logs a browser in."""
    headers = {"Authorization": f"Bearer {gateway.token}"}
    async with session.post(f"{gateway.url}/gateway/dashboard-link", headers=headers) as response:
        assert response.status == 200
        return str((await response.json())["url"])


async def go(page: Page, path: str) -> None:
    """Show another page of the dashboard."""
    await page.evaluate("(hash) => { location.hash = hash; }", path)


async def changed(page: Page, change: Callable[[dict[str, Any]], object]) -> None:
    """Change each status before the page gets it, as if the gateway were in another state."""

    async def answer(route: Route) -> None:
        response = await route.fetch()
        document = await response.json()
        change(document)
        await route.fulfill(response=response, json=document)

    await page.route("**/gateway/status", answer)


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        pytest.param(chromium.DESK, "light", id="desk"),
        pytest.param(PHONE, "dark", id="phone", marks=pytest.mark.long),
    ],
)
async def test_pages_fit_have_names_and_contrast_and_run_nothing_that_was_sent(
    browser: Browser,
    gateway: GatewayProcess,
    session: aiohttp.ClientSession,
    size: tuple[int, int],
    theme: str,
) -> None:
    link, found = await link_of(gateway, session), {}
    async with chromium.visit(browser, f"{gateway.url}/gateway/", size, theme, link=link) as page:
        for path, title in {"#/": "Overview", "#/routing": "Routing", "#/engines": "Engines"}.items():
            await go(page, path)
            await expect(page.locator("h1")).to_have_text(title)
            found[path] = await page_checks.faults(page)
        await page.get_by_label("Filter").fill("onerror")  # its model
        await expect(page.locator("#engines-rows tr")).to_have_count(1)
        await page.get_by_role("link", name="127.0.0.1").click()
        await expect(page.get_by_role("heading", name="Cache")).to_be_visible()
        await expect(page.locator("main")).to_contain_text(HOSTILE)
        found["engine"] = await page_checks.faults(page)
        await go(page, "#/routing")
        await page.get_by_role("link", name="onerror").click()
        await expect(page.locator("h1")).to_have_text(HOSTILE)
        await expect(page.locator(".verdict.hit")).to_contain_text("Deciding again gives the same")
        found["decision"] = await page_checks.faults(page)
        assert await page.evaluate("window.hacked") is None
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.long
async def test_a_decision_says_what_it_weighed_what_came_and_what_it_was_made_from(
    browser: Browser, gateway: GatewayProcess, session: aiohttp.ClientSession
) -> None:
    async with session.get(
        f"{gateway.url}/gateway/decisions", headers={"Authorization": f"Bearer {gateway.token}"}
    ) as response:
        [row] = [one for one in (await response.json())["decisions"] if one["request"] == "turn/3"]
    url = f"{gateway.url}/gateway/#/routing"
    async with chromium.visit(browser, url, unanswered=True, link=await link_of(gateway, session)) as page:
        await page.get_by_role("link", name="turn/3").click()
        costs = page.locator("#costs-rows")
        await expect(costs).to_contain_text(row["decision"]["engine"])
        await expect(costs).to_contain_text(row["decision"]["alternatives"][0]["engine"])
        for title in ("Queue", "Load", "Compute", "Preemption", "Cached tokens"):
            await expect(page.get_by_role("columnheader", name=title).first).to_be_visible()
        await expect(page.locator("main")).to_contain_text("7, expected")
        await expect(page.locator("#fleet-rows tr")).to_have_count(2)
        await page.get_by_role("button", name="Replay this decision").click()
        await expect(page.locator(".verdict.hit")).to_be_visible()
        await go(page, "#/routing/forgotten")
        await expect(page.get_by_role("alert")).to_contain_text("not among the last that were kept")


@pytest.mark.long
async def test_a_page_without_a_session_asks_and_takes_the_token_but_keeps_it_nowhere(
    browser: Browser, gateway: GatewayProcess
) -> None:
    url = f"{gateway.url}/gateway/"
    async with chromium.visit(browser, url, live=False, unanswered=True) as page:
        await page.get_by_label(FIELD).fill("not the token")
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("alert")).to_contain_text("unknown, used before or too old")
        await page.get_by_label(FIELD).fill(gateway.token)
        await page.get_by_role("button", name="Log in").click()
        await expect(page.locator("#connection.live")).to_be_visible()
        kept = await page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert gateway.token not in kept
        await page.get_by_role("button", name="Log out").click()
        await expect(page.get_by_label(FIELD)).to_be_visible()


@pytest.mark.long
async def test_a_dead_event_thread_is_the_first_that_the_page_shows(
    browser: Browser, gateway: GatewayProcess, session: aiohttp.ClientSession
) -> None:
    def dies(status: dict[str, Any]) -> None:
        status["kv_events_thread"] = {"hears": False, "error": f"ValueError: {HOSTILE}"}

    url = f"{gateway.url}/gateway/"
    async with chromium.visit(browser, url, link=await link_of(gateway, session)) as page:
        await expect(page.locator(".tile", has_text="KV events")).not_to_contain_text("ended")
        await changed(page, dies)
        await expect(page.get_by_role("alert")).to_contain_text("The thread that hears KV events has ended")
        await expect(page.get_by_role("alert")).to_contain_text(HOSTILE)
        await expect(page.locator(".tile", has_text="KV events")).to_contain_text("the thread has ended")


@pytest.mark.long
async def test_a_thousand_engines_are_shown_a_hundred_at_a_time_and_found_by_name(
    browser: Browser, gateway: GatewayProcess, session: aiohttp.ClientSession
) -> None:
    def grows(status: dict[str, Any]) -> None:
        one = status["engines"][0]
        status["engines"] = [
            {**one, "name": f"engine-{number:04}", "state": "down" if number == 7 else "up", "reason": ""}
            for number in range(1_000)
        ]
        heard = {
            "phase": "in_order",
            "whole": True,
            "doubtful": False,
            "batches": 9,
            "gaps": 0,
            "restarts": 0,
        }
        heard |= {"malformed": 0, "orphans": 0, "block_life_s": 0, "event_lag_s": 0}
        heard |= {"blocks": {"l0": 1_000, "l1": 0}, "block_tokens": {"l0": [16], "l1": []}}
        status["kv_events"] = {row["name"]: heard for row in status["engines"]}
        status["queue"] = {"waiting": 3, "classes": {HOSTILE: {"waiting": 3}}}

    url = f"{gateway.url}/gateway/"
    async with chromium.visit(browser, url, link=await link_of(gateway, session)) as page:
        await changed(page, grows)
        await expect(page.locator(".tile").first).to_contain_text("999 of 1,000")
        await expect(page.locator("section", has_text="Queue").last).to_contain_text("3")
        await go(page, "#/engines")
        await expect(page.locator("#engines-rows tr")).to_have_count(100)
        await page.get_by_label("Filter").fill("down")
        await expect(page.locator("#engines-rows tr")).to_have_count(1)
        await expect(page.locator("#engines-rows")).to_contain_text("16.0\u00a0k")
        assert await page.evaluate("window.hacked") is None


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("size", [chromium.DESK, PHONE], ids=["desk", "phone"])
async def test_ranks_are_below_their_engine_with_queue_cache_and_events(
    browser: Browser,
    gateway: GatewayProcess,
    session: aiohttp.ClientSession,
    size: tuple[int, int],
    count: int,
) -> None:
    def divides(status: dict[str, Any]) -> None:
        first, other = status["engines"]
        first |= {"name": "ranked", "in_flight": count, "waiting": count, "queue_s": 2.5, "sent": 10 * count}
        other |= {"name": "single", "queue_s": 1.5}
        ranks = [
            {**first, "name": f"ranked@{number}", "in_flight": 1, "waiting": 1, "sent": 10}
            for number in range(count)
        ]
        fields = ("name", "in_flight", "sent", "waiting", "waiting_tokens", "context_tokens", "queue_s")
        fields += ("prefill_tokens_s", "measured")
        first["ranks"] = [{field: rank[field] for field in fields} for rank in ranks]
        heard = {
            "connected": True,
            "phase": "in_order",
            "whole": True,
            "doubtful": False,
            "batches": 9,
            "gaps": 0,
        }
        heard |= {"restarts": 0, "malformed": 0, "orphans": 0, "block_life_s": 0, "event_lag_s": 0}
        heard |= {"blocks": {"l0": 1_000, "l1": 0}, "block_tokens": {"l0": [16], "l1": []}}
        status["kv_events"] = {rank["name"]: heard for rank in ranks}
        status["kv_events"]["ranked@1"] = {**heard, "whole": False, "gaps": 3}

    url, link = f"{gateway.url}/gateway/", await link_of(gateway, session)
    async with chromium.visit(browser, url, size, link=link) as page:
        await changed(page, divides)
        await go(page, "#/engines")
        rows = page.locator("#engines-rows tr")
        wanted = ["ranked", *(f"ranked@{number}" for number in range(count)), "single"]
        await expect(page.locator("#engines-rows tr th a")).to_have_text(wanted)
        await expect(rows.nth(0)).to_contain_text(f"{count} ranks")
        await expect(rows.nth(0)).to_contain_text("with gaps")  # as the worst of them
        await expect(rows.nth(0)).to_contain_text("32.0" if count == 2 else "128")
        for number in range(count):
            await expect(rows.nth(1 + number)).to_contain_text("with gaps" if number == 1 else "exact")
            await expect(rows.nth(1 + number)).to_contain_text("16.0\u00a0k")
            await expect(rows.nth(1 + number)).to_contain_text("1 waiting")
        # By any column, either way, they stay below their engine.
        for sort, order in (("-queue", wanted), ("queue", [wanted[-1], *wanted[:-1]])):
            await go(page, f"#/engines?sort={sort}")
            await expect(page.locator("#engines-rows tr th a")).to_have_text(order)
        assert await page_checks.faults(page) == []
        await page.get_by_role("link", name="ranked@1", exact=True).click()
        await expect(page.locator("h1")).to_have_text("ranked@1")
        await expect(page.locator("main")).to_contain_text("3 times")
        assert await page_checks.faults(page) == []
        await page.locator(".crumbs").get_by_role("link", name="ranked").click()
        await expect(page.locator("#ranks-rows tr")).to_have_count(count)
        assert await page_checks.faults(page) == []


@pytest.mark.long
async def test_the_page_says_that_the_gateway_is_gone_and_comes_back_with_it(
    browser: Browser, gateway: GatewayProcess, session: aiohttp.ClientSession
) -> None:
    url = f"{gateway.url}/gateway/"
    async with chromium.visit(browser, url, unanswered=True, link=await link_of(gateway, session)) as page:
        gone = asyncio.Event()

        async def cut(route: Route) -> None:
            gone.set()
            await route.abort()

        await page.route("**/gateway/status", cut)
        await gone.wait()
        await expect(page.get_by_role("alert")).to_contain_text("Connection lost")
        await page.unroute("**/gateway/status")
        await expect(page.locator("#connection.live")).to_be_visible()
