"""The dashboard in real Chromium: each page in both themes, on a desk and on a phone; live, by keyboard, in trouble."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from tests.harness import chromium, page_checks
from tests.harness.dashboard_cluster import Cluster, instance, served
from tests.integration.controller.dashboard_scene import Visit, explained, twelve

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

DESK = chromium.DESK
PHONE = (390, 844)
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'

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
    "#/explorer?request=cmpl-1": "text=make room for others",
    "#/metrics": "text=kvstrata_controller_events_total",
}


@pytest.mark.parametrize(("size", "theme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"])
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


async def test_every_action_can_be_done_by_keyboard(visit: Visit) -> None:
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


async def test_without_the_stream_the_page_polls(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0))
    cluster.streams = False
    async with served(cluster) as url, visit(f"{url}#/instances", unanswered=True, live=False) as page:
        await expect(page.locator("#connection.polling")).to_be_visible()
        cluster.instances["b-1"] = instance("b-1", 1)
        cluster.tell("joined", "b-1", host="joined by another way")
        await expect(page.get_by_role("row", name="b-1")).to_be_visible()
        await page.get_by_role("link", name="Events", exact=True).click()
        await expect(page.locator(".log")).to_contain_text("joined by another way")


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
