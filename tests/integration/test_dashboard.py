"""The dashboard in real Chromium: each page in both themes, on a desk and on a phone; live, by keyboard, in trouble."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.harness import chromium, page_checks
from tests.harness.dashboard_cluster import Cluster, instance, now_ms, served

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

DESK = chromium.DESK
PHONE = (390, 844)
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'

Visit = Callable[..., AbstractAsyncContextManager[Page]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    try:
        async with chromium.browser() as running:
            yield running
    except chromium.Unavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture
def visit(browser: Browser) -> Visit:
    return partial(chromium.visit, browser)


def twelve() -> Cluster:
    """A cluster in which something of everything is going on."""
    cluster = Cluster(*(instance(f"{'abc'[number % 3]}-{number}", number) for number in range(12)))
    sync = {"state": "running", "keys": 412_000, "parts": 52, "count": 1}
    changes: dict[str, dict[str, Any]] = {
        "b-4": {"reported_state": "syncing", "confirmed": False, "sync": sync},
        "c-5": {"draining": True},
        "a-6": {"state": "dead", "heard_ago_s": 48.0, "confirmed": False, "sync": {"state": "none"}},
        "b-7": {"state": "restored", "confirmed": False, "sync": {"state": "none"}},
        "c-8": {"confirmed": False, "sync": {"state": "wanted", "wanted_because": "a gap in the events"}},
        "a-9": {"reported_state": "frozen", "sync": sync},
    }
    for name, change in changes.items():
        cluster.instances[name].update(change)
    cluster.removed.append("z-99")
    cluster.tell("joined", "a-0", host="node-00.example.net", version="0.1.0")
    cluster.tell("synced", "a-0", tags={"l1": 8_311, "disk-0": 43_781}, took_s=0.081)
    cluster.tell("resync", "c-8", reason="a gap in the events", expected=12, got=14)
    cluster.tell("died", "a-6", silent_s=30.2)
    cluster.tell("snapshot_restored", members=11, path="/var/lib/kvstrata/directory.snapshot")
    cluster.lookup = lookup(40, {"a-0": 28, "b-1": 16})
    cluster.misses = [miss(28, "evicted", "by lru"), miss(29, "unknown_key", "")]
    cluster.explained["cmpl-1"] = explained("evicted")
    return cluster


def miss(chunk: int, reason: str, detail: str) -> dict[str, Any]:
    """A chunk that nobody has, as one instance explains it."""
    told = [{"instance": "a-0", "tier": "", "reason": reason, "detail": detail}]
    return {"chunk": chunk, "key": "cd" * 32, "reason": reason, "told": told}


def lookup(n_chunks: int, holders: dict[str, int]) -> dict[str, Any]:
    """The answer for a prompt whose first chunks some instances hold: so many each."""
    chunks = []
    for index in range(n_chunks):
        places = [
            {"instance": name, "tier": "l1" if index < 20 else "disk-0", "confirmed": name != "b-1"}
            for name, held in holders.items()
            if index < held
        ]
        keys = [f"{index * 2 + part:064x}" for part in range(2)]
        chunks.append({"index": index, "keys": keys, "places": places})
    longest = [
        {"instance": name, "chunks": min(20, held), "tokens": min(20, held) * 256, "confirmed": name != "b-1"}
        for name, held in holders.items()
    ]
    return {
        "n_chunks": n_chunks,
        "n_slices": 2,
        "chunk_tokens": 256,
        "identity": "ef" * 32,
        "held_chunks": max(holders.values(), default=0),
        "longest": longest,
        "chunks": chunks,
    }


def explained(reason: str) -> dict[str, Any]:
    """One lookup of a request, as an instance's explain tells it."""
    miss = {"chunk": 16, "reason": reason, "detail": "by lru", "storage_key": "cd" * 32}
    return {
        "request_id": "cmpl-1",
        "tenant": "acme",
        "identity": "ab" * 32,
        "unix_ms": now_ms(),
        "duration_ms": 1.83,
        "chunks": 24,
        "hits": {"l1": 12, "l2": 4, "served": 16},
        "first_miss": miss,
    }


PAGES = {
    "#/": "Overview",
    "#/instances": "Instances",
    "#/instances/a-0": "a-0",
    "#/instances/a-0/workers": "a-0",
    "#/instances/a-0/runtime": "a-0",
    "#/tiers": "Tiers",
    "#/explorer": "Explorer",
    "#/explorer?request=cmpl-1": "Explorer",
    "#/events": "Events",
    "#/metrics": "Metrics",
    "#/nowhere": "No such page",
}
SETTLED = {
    "#/": "[data-plot=share] svg .area",
    "#/instances/a-0/workers": "text=scheduler",
    "#/instances/a-0/runtime": "text=MainThread",
    "#/tiers": "text=disk-0",
    "#/explorer?request=cmpl-1": "text=made room for others",
    "#/metrics": "text=kvstrata_controller_events_total",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
async def test_every_page_fits_has_names_and_contrast(
    visit: Visit, size: tuple[int, int], theme: str
) -> None:
    found = {}
    async with served(twelve()) as url, visit(url, size, theme) as page:
        for path, title in PAGES.items():
            await page.evaluate("(hash) => { location.hash = hash; }", path)
            await expect(page.locator("h1")).to_have_text(title)
            await expect(page).to_have_title(f"{title} · kvstrata")
            if path in SETTLED:
                await page.locator(SETTLED[path]).first.wait_for()
            if path != "#/nowhere":
                found[path] = await page_checks.faults(page)
    assert {path: faults for path, faults in found.items() if faults} == {}


async def test_changes_show_without_reloading_and_leave_the_focus_alone(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0), instance("b-1", 1))
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        row = page.get_by_role("row", name="a-0")
        drain = row.get_by_role("button", name="Drain a-0")
        await drain.focus()
        cluster.instances["a-0"]["used_bytes"] = {"l1": 48 << 30, "disk-0": 0}
        cluster.instances["a-1"] = instance("a-1", 2, zone="new zone")
        await expect(row).to_contain_text("48.0\u00a0GiB")
        await expect(page.get_by_role("row", name="new zone")).to_be_visible()
        await expect(drain).to_be_focused()


async def test_dying_instance_is_marked_told_and_counted(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0), instance("b-1", 1))
    async with served(cluster) as url, visit(f"{url}#/") as page:
        await expect(page.locator(".tile", has_text="Instances")).to_contain_text("all in sync")
        cluster.instances["b-1"].update(state="dead", heard_ago_s=31.0)
        cluster.tell("died", "b-1", silent_s=31.0)
        await expect(page.locator(".tile", has_text="Instances")).to_contain_text("1 dead")
        await expect(page.locator("#announce")).to_contain_text("b-1 died")
        await page.get_by_role("link", name="Events", exact=True).click()
        await expect(page.locator(".log li").first).to_contain_text("silent 31\u00a0s")
        await page.get_by_role("link", name="Instances", exact=True).click()
        row = page.get_by_role("row", name="b-1")
        await expect(row).to_contain_text("dead")
        await expect(row.get_by_role("button", name="Drain")).to_have_count(0)
        await expect(row.get_by_role("button", name="Remove")).to_be_visible()


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "by and by"])
async def test_drain_is_done_only_when_confirmed(visit: Visit, slow: bool) -> None:
    cluster = Cluster(instance("a-0", 0))
    cluster.slow_commands = slow
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        drain = page.get_by_role("button", name="Drain a-0")
        await drain.click()
        dialog = page.get_by_role("alertdialog", name="Drain a-0?")
        await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await expect(drain).to_be_focused()
        assert cluster.requests == []
        await drain.click()
        await dialog.get_by_role("button", name="Drain").click()
        await expect(page.locator(".toast")).to_contain_text("a-0 is draining.")
        await expect(page.get_by_role("row", name="a-0")).to_contain_text("draining")
        await page.get_by_role("button", name="End draining a-0").click()
        await page.get_by_role("button", name="End draining", exact=True).click()
        await expect(page.get_by_role("row", name="a-0")).to_contain_text("ready")
    paths = [path for _, path, _ in cluster.requests]
    assert paths == ["/v1/instances/a-0/drain", "/v1/instances/a-0/undrain"]


async def test_instances_of_long_names_that_drain_fit_a_desk(visit: Visit) -> None:
    long = instance("gpu-node-0123456789.rack-17.example.net-instance-0123456789-5555"[:64], 0)
    rows = [long, instance("a-0", 0), instance("b-1", 1)]
    wide = {"draining": True, "peer_sent_bytes_total": 1023 << 40, "peer_read_bytes_total": 1023 << 40}
    cluster = Cluster(*({**row, **wide} for row in rows))
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        await expect(page.get_by_role("button", name="End draining")).to_have_count(3)
        table = page.locator(".scroll")
        assert await table.evaluate("(box) => box.scrollWidth - box.clientWidth") == 0


async def test_remove_is_done_only_when_confirmed(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0), instance("b-1", 1))
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        await page.get_by_role("button", name="Remove b-1").click()
        dialog = page.get_by_role("alertdialog", name="Remove b-1?")
        await expect(dialog).to_contain_text("is not let in again until somebody allows it")
        await dialog.get_by_role("button", name="Cancel").click()
        assert cluster.requests == []
        await page.get_by_role("button", name="Remove b-1").click()
        await dialog.get_by_role("button", name="Remove").click()
        await expect(page.get_by_role("row", name="b-1")).to_have_count(0)
        await expect(page.get_by_role("row", name="a-0")).to_be_visible()
        await page.get_by_role("button", name="Allow b-1").click()
        await expect(page.get_by_role("button", name="Allow b-1")).to_have_count(0)
    assert [(method, path) for method, path, _ in cluster.requests] == [
        ("DELETE", "/v1/instances/b-1"),
        ("POST", "/v1/instances/b-1/allow"),
    ]


async def test_what_is_pressed_stays_where_it_is_until_it_is_let_go(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0), instance("b-1", 1))
    cluster.removed = ["c-2"]
    drawn = """async () => {
        const { live } = await import("/dashboard/live.js");
        const until = async (there) => { while (!there()) await new Promise((done) => setTimeout(done, 20)); };
        await until(() => live.instances.length === 1);
        const look = live.cluster.unix_ms;
        await until(() => live.cluster.unix_ms > look);  // the look before would be drawn by now
    }"""
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        button = page.get_by_role("button", name="Allow c-2")
        await button.hover()
        await page.mouse.down()
        del cluster.instances["b-1"]
        await page.evaluate(drawn)
        await expect(page.get_by_role("row", name="b-1")).to_be_visible()
        await page.mouse.up()
        await expect(page.get_by_role("row", name="b-1")).to_have_count(0)
        await expect(button).to_have_count(0)
    assert [path for _, path, _ in cluster.requests] == ["/v1/instances/c-2/allow"]


async def test_refused_action_says_why(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0))
    async with served(cluster) as url, visit(f"{url}#/instances/a-0", unanswered=True) as page:
        await page.get_by_role("button", name="Remove a-0").click()
        del cluster.instances["a-0"]
        await page.get_by_role("button", name="Remove", exact=True).click()
        await expect(page.get_by_role("alert")).to_contain_text("there is no 'a-0'")


async def test_explorer_shows_where_a_prompt_is_and_what_is_missing(visit: Visit) -> None:
    cluster = twelve()
    async with served(cluster) as url, visit(f"{url}#/explorer") as page:
        await page.get_by_label("Token ids of the prompt").fill("[1, 2, 3]")
        await page.get_by_role("button", name="Look up").click()
        verdict = page.locator(".verdict")
        await expect(verdict).to_contain_text("The first 28 of 40 chunks are there")
        await expect(verdict).to_contain_text("Chunk 28 is the first that nobody has told of")
        await expect(verdict).to_contain_text("It was there and made room for others. (a-0: by lru)")
        await expect(page.get_by_role("row", name="7424 to 7679")).to_contain_text("Nobody has named this")
        cluster.silent = ["b-1"]
        await page.get_by_role("button", name="Look up").click()
        await expect(page.get_by_text("b-1: no answer within 5 s")).to_be_visible()
        await expect(page.get_by_role("row", name="2048 to 2303")).to_contain_text("b-1 l1 · unconfirmed")
        await expect(page.get_by_role("row", name="7168 to 7423")).to_contain_text("nowhere")
        await expect(page.locator(".strips li").first).to_contain_text("first 28 of 40")
        cluster.lookup = lookup(3, {"b-1": 3})
        await page.get_by_role("button", name="Look up").click()
        await expect(verdict).to_contain_text("All 3 chunks are there")
        cluster.lookup = lookup(3, {})
        await page.get_by_role("button", name="Look up").click()
        await expect(verdict).to_contain_text("Nobody has its first chunk")
    sent = {"tokens": [1, 2, 3], "model": "meta-llama/Llama-3.1-8B-Instruct"}
    assert [body for _, _, body in cluster.requests] == [sent] * 4


async def test_explorer_explains_a_request_by_its_id(visit: Visit) -> None:
    async with served(twelve()) as url, visit(f"{url}#/explorer", unanswered=True) as page:
        await page.get_by_role("button", name="Request id").click()
        await page.get_by_label("Request id", exact=True).fill("cmpl-1")
        await page.keyboard.press("Enter")
        await expect(page.locator(".verdict")).to_contain_text("16 of 24 chunks served")
        await expect(page.locator(".verdict")).to_contain_text(
            "It was there and made room for others. (by lru)"
        )
        await page.get_by_label("Request id", exact=True).fill("cmpl-2")
        await page.get_by_role("button", name="Explain").click()
        await expect(page.get_by_role("alert")).to_contain_text(
            'none of the 10 instances that answered remembers "cmpl-2"'
        )


async def test_explorer_refuses_what_is_no_token_or_key_before_it_asks(visit: Visit) -> None:
    cluster = twelve()
    async with served(cluster) as url, visit(f"{url}#/explorer") as page:
        await page.get_by_label("Token ids of the prompt").fill("1, two, 3")
        await page.get_by_role("button", name="Look up").click()
        await expect(page.get_by_role("alert")).to_contain_text('token ids are whole numbers, found "two"')
        await page.get_by_role("button", name="Storage keys").click()
        await page.get_by_role("textbox", name="Storage keys").fill("abc")
        await page.get_by_role("button", name="Look up").click()
        await expect(page.get_by_role("alert")).to_contain_text("64 hexadecimal digits")
    assert cluster.requests == []


async def test_empty_cluster_says_which_line_starts_an_instance(visit: Visit) -> None:
    cluster = Cluster()
    async with served(cluster) as url, visit(url) as page:
        for path in ("#/instances", "#/tiers", "#/explorer", "#/instances/a-0", "#/"):
            await page.evaluate("(hash) => { location.hash = hash; }", path)
            empty = page.locator(".empty")
            await expect(empty).to_contain_text("No instance has registered yet")
            await expect(empty).to_contain_text("lmcache-server --controller-url tcp://127.0.0.1:8400")
        assert await page_checks.faults(page) == []
        cluster.instances["a-0"] = instance("a-0", 0)
        await expect(page.locator(".tile", has_text="Instances")).to_contain_text("1")
        await expect(empty).to_have_count(0)


async def test_token_is_asked_for_and_kept_for_the_tab_only(visit: Visit) -> None:
    cluster = twelve()
    cluster.token = "right"
    async with served(cluster) as url, visit(url, unanswered=True, live=False) as page:
        field = page.get_by_label("Bearer token")
        await expect(field).to_be_focused()
        assert await field.get_attribute("type") == "password"
        await page.keyboard.press("Escape")
        await field.fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("refused")
        await field.fill("right")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator("#connection.live")).to_be_visible()
        await page.reload()
        await expect(page.locator("#connection.live")).to_be_visible()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        kept = await page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
        assert "right" not in "".join(kept)


async def test_hostile_names_are_text(visit: Visit) -> None:
    cluster = Cluster(
        instance("a-0", 0, zone=HOSTILE, host=HOSTILE, version=HOSTILE, http_url=f"javascript:{HOSTILE}")
    )
    cluster.models = [HOSTILE]
    cluster.tell("refused", "a-0", reason=HOSTILE)
    cluster.explained["x"] = explained(HOSTILE)
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        for path in (
            "#/instances",
            "#/instances/a-0",
            "#/instances/a-0/workers",
            "#/explorer?request=x",
            "#/events",
        ):
            await page.evaluate("(hash) => { location.hash = hash; }", path)
            await expect(page.get_by_text(HOSTILE).first).to_be_visible()
            assert await page.locator("main img, main script").count() == 0
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await page.locator('a[href^="javascript"]').count() == 0
        assert await page.evaluate("window.hacked") is None


async def test_who_was_asked_for_a_moment_only_can_be_seen_to_have_been(visit: Visit) -> None:
    cluster = twelve()
    cluster.asked_every_s = 300
    async with served(cluster) as url, visit(url) as page:
        area = page.locator("[data-plot=share] svg .area").first
        await area.wait_for()
        path = await area.get_attribute("d")
        assert path is not None
        widths = []
        for run in path.removesuffix("Z").split("Z"):
            across = [float(place.split()[0]) for place in run.removeprefix("M").split("L")]
            widths.append(max(across) - min(across))
        assert min(widths[1:-1]) >= 1.5
        assert min(widths) >= 0.7, "at an end of the chart there is a neighbour on one side only"


async def test_all_is_done_by_keyboard(visit: Visit) -> None:
    async with served(twelve()) as url, visit(url) as page:
        await page.locator("[data-plot=found] svg .area").first.wait_for()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        for _ in range(4):
            await page.keyboard.press("Tab")
        chart = page.get_by_role("slider", name="Hit rate by source")
        await expect(chart).to_be_focused()
        before = await chart.get_attribute("aria-valuetext")
        await page.keyboard.press("PageDown")
        await page.keyboard.press("Home")
        await expect(chart).not_to_have_attribute("aria-valuetext", before or "")
        await expect(chart).to_have_attribute("aria-valuetext", re.compile(r"^\d\d:\d\d:\d\d: L1 \d+"))
        await page.get_by_role("link", name="Instances", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        head = page.get_by_role("columnheader", name="Hit rate")
        await head.get_by_role("button").focus()
        await expect(head).to_have_attribute("aria-sort", "none")
        await page.keyboard.press("Enter")
        await expect(head).to_have_attribute("aria-sort", "descending")
        await page.keyboard.press("Space")
        await expect(head).to_have_attribute("aria-sort", "ascending")
        shares = await page.locator('td[data-title="Hit rate"]').all_inner_texts()
        numbers = [int(text.split()[0]) for text in shares if text.strip() != "–"]
        assert numbers == sorted(numbers)
        assert [text.strip() for text in shares[-2:]] == ["–", "–"]
        ring = await head.get_by_role("button").evaluate("(node) => getComputedStyle(node).outlineStyle")
        assert ring == "solid"


async def test_chosen_theme_outlives_a_reload_and_the_system_decides_without_one(visit: Visit) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    async with served(twelve()) as url, visit(url, theme="dark") as page:
        dark = await page.evaluate(ground)
        await page.get_by_label("Theme").select_option("light")
        light = await page.evaluate(ground)
        assert light != dark
        await page.reload()
        assert await page.evaluate(ground) == light
        await page.get_by_label("Theme").select_option("System")
        assert await page.evaluate(ground) == dark
        await page.emulate_media(color_scheme="light")
        assert await page.evaluate(ground) == light


async def test_lost_connection_says_since_when_and_comes_back(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0))
    async with AsyncExitStack() as stack, AsyncExitStack() as first:
        url = await first.enter_async_context(served(cluster))
        page = await stack.enter_async_context(visit(f"{url}#/instances", unanswered=True))
        await first.aclose()
        lost = page.get_by_role("alert")
        await expect(lost).to_contain_text(re.compile(r"Connection lost at \d\d:\d\d:\d\d"))
        await expect(page.locator("#connection")).to_contain_text("Disconnected")
        await expect(page.get_by_role("row", name="a-0")).to_be_visible()
        assert await page_checks.faults(page) == []
        async with served(cluster, port=urlsplit(url).port or 0):
            await expect(page.locator("#connection.live")).to_be_visible()
            await expect(lost).to_have_count(0)
            cluster.instances["b-1"] = instance("b-1", 1)
            await expect(page.get_by_role("row", name="b-1")).to_be_visible()


async def test_without_the_stream_the_page_asks(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0))
    cluster.streams = False
    async with served(cluster) as url, visit(f"{url}#/instances", unanswered=True, live=False) as page:
        await expect(page.locator("#connection.polling")).to_be_visible()
        cluster.instances["b-1"] = instance("b-1", 1)
        cluster.tell("joined", "b-1", host="joined by another way")
        await expect(page.get_by_role("row", name="b-1")).to_be_visible()
        await page.get_by_role("link", name="Events", exact=True).click()
        await expect(page.locator(".log")).to_contain_text("joined by another way")


async def test_events_are_filtered_and_the_tail_stops(visit: Visit) -> None:
    cluster = twelve()
    async with served(cluster) as url, visit(f"{url}#/events") as page:
        rows = page.locator(".log li")
        await expect(rows).to_have_count(5)
        await page.get_by_label("Kind").select_option("resync")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("c-8")
        await page.get_by_label("Kind").select_option("")
        await page.get_by_label("Filter events").fill("a-0")
        await expect(rows).to_have_count(2)
        await page.get_by_label("Filter events").fill("")
        await page.get_by_role("button", name="Stop the tail").click()
        cluster.tell("left", "a-0", reason="said goodbye")
        await expect(page.get_by_role("button", name="Go on (1 new)")).to_be_visible()
        await expect(rows).to_have_count(5)
        await page.get_by_role("button", name="Go on").click()
        await expect(rows.first).to_contain_text("said goodbye")


async def test_metrics_are_searched_by_meaning_and_histograms_are_summed_up(visit: Visit) -> None:
    async with served(twelve()) as url, visit(f"{url}#/metrics") as page:
        await page.get_by_label("Filter metrics").fill("time answer")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text(
            re.compile(r"500× · mean 6\d\d\s*µs · p50 ≈ 6\d\d\s*µs · p99 ≈ 2\.\d\s*ms")
        )
        await page.get_by_label("Filter metrics").fill("state live")
        await expect(rows).to_have_count(1)
        await page.get_by_label("Filter metrics").fill("no such thing")
        await expect(page.get_by_text("lets none of the")).to_be_visible()


async def test_runtime_page_shows_process_and_environment(visit: Visit) -> None:
    async with served(twelve()) as url, visit(f"{url}#/instances/a-0") as page:
        await page.get_by_role("link", name="Runtime").click()
        for text in ("182\u00a0MiB", "210\u00a0µs", "lane-load-0", "1,288 · 117 · 9", "(masked)"):
            await expect(page.locator("main")).to_contain_text(text)
        await page.get_by_label("Filter environment").fill("omp")
        await expect(page.get_by_role("row", name="OMP_NUM_THREADS")).to_be_visible()
        await expect(page.get_by_role("row", name="KVSTRATA_L1_SIZE_GB")).to_have_count(0)


async def test_every_file_is_small_local_and_under_a_strict_policy() -> None:
    async with served(Cluster()) as url, httpx.AsyncClient(base_url=url) as client:
        waiting, seen = ["/"], {}
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            answer = await client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            seen[path] = len(answer.content)
            for found in re.findall(
                r"""(?:from|src=|href=) ?"((?:\./|\.\./|dashboard/)[^"]+)""", answer.text
            ):
                waiting.append(str(httpx.URL(f"http://x{path}").join(found).path))
            foreign = set(re.findall(r"""\w+://[^\s"'`$]+""", answer.text))
            assert foreign <= {"http://www.w3.org/2000/svg", "tcp://"}, path
        assert {"/dashboard/main.js", "/dashboard/style.css", "/dashboard/pages/explorer.js"} <= seen.keys()
        assert sum(seen.values()) < 200_000
        for path in (
            "/dashboard/../app.py",
            "/dashboard/%2e%2e/app.py",
            "/dashboard/nothing.js",
            "/dashboard/pages",
        ):
            assert (await client.get(path)).status_code == 404, path


async def test_controller_that_does_not_lead_says_who_does(visit: Visit) -> None:
    cluster = twelve()
    cluster.election.leads = False
    cluster.election.leader, cluster.election.leader_url = "controller-1", "http://other.example.net:9000"
    cluster.election.members = ["controller-0", "controller-1"]
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        await expect(page.locator(".note")).to_contain_text("This controller does not lead")
        link = page.locator(".note").get_by_role("link", name="controller-1")
        await expect(link).to_have_attribute("href", "http://other.example.net:9000")
        assert await page_checks.faults(page) == []
