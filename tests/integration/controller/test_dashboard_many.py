"""The dashboard with 500 instances, in real Chromium: pages of rows, filters, kept places, only changes drawn."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from playwright.async_api import Page, expect

from kvstrata.controller.feed import Feed, State
from tests.harness import chromium, page_checks
from tests.harness.dashboard_cluster import Cluster, instance, served
from tests.integration.controller.dashboard_scene import Visit

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

TIERS = ("l1", "disk-0", "redis-1", "mooncake-2")
PHONE = (390, 844)
ON_TIME_S = -3_600.0
"""Heard of in the future: no heartbeat becomes late while a test runs."""


def one(number: int) -> dict[str, Any]:
    """An instance with four tiers and four workers; it has `number` chunks more than the first in each tier."""
    ours: dict[str, Any] = {
        "tiers": list(TIERS),
        "keys": {tier: 100 * (place + 1) + number for place, tier in enumerate(TIERS)},
        "used_bytes": dict.fromkeys(TIERS, number << 20),
        "capacity_bytes": dict.fromkeys(TIERS, 64 << 30),
        "sessions": 4,
        "heard_ago_s": ON_TIME_S,
    }
    return instance(f"node-{number:04}", number, **ours)


def many(count: int = 500) -> Cluster:
    """So many instances."""
    return Cluster(*(one(number) for number in range(count)))


async def names(page: Page, table: str) -> list[str]:
    """What stands first in each row that is shown, in order."""
    found: list[str] = await page.locator(f"#{table}-rows").evaluate(
        "(rows) => [...rows.children].map((row) => (row.querySelector('a') ?? row.querySelector('td')).textContent)"
    )
    return found


async def test_pages_of_500_instances_have_100_rows_that_address_and_filter_choose(visit: Visit) -> None:
    async with served(many()) as url, visit(f"{url}#/instances") as page:
        rows = page.locator("#instances-rows tr")
        await expect(rows).to_have_count(100)
        await expect(page.get_by_role("status").filter(has_text="500 in all")).to_be_visible()
        await page.get_by_role("button", name="Next page of Instances").click()
        await expect(rows.first).to_contain_text("node-0100")
        assert "page=2" in page.url
        await page.get_by_role("button", name="Last page of Instances").click()
        await expect(rows.last).to_contain_text("node-0499")
        await expect(page.get_by_role("button", name="Next page of Instances")).to_be_disabled()
        await page.get_by_role("columnheader", name="Chunks").get_by_role("button").click()
        await expect(rows.first).to_contain_text("node-0499")
        await page.get_by_label("Filter instances").fill("zone-c 04")
        await expect(page.get_by_text("lets none of the 500 through")).to_be_visible()
        await page.get_by_label("Filter instances").fill("node-049")
        await expect(page.get_by_role("status").filter(has_text="10 of 500")).to_be_visible()
        await page.get_by_role("link", name="Tiers", exact=True).click()
        await expect(page.locator("#tiers-each-rows tr")).to_have_count(100)
        await expect(page.get_by_role("status").filter(has_text="2,000 in all")).to_be_visible()
        await page.go_back()
        await expect(page.get_by_label("Filter instances")).to_have_value("node-049")
        await expect(rows.first).to_contain_text("node-0499")
        await page.reload()
        await expect(rows.first).to_contain_text("node-0499")
        await expect(rows).to_have_count(10)


async def test_only_cells_whose_values_changed_are_touched(visit: Visit) -> None:
    cluster = many()
    async with served(cluster) as url, visit(f"{url}#/instances") as page:
        await expect(page.locator("#instances-rows tr")).to_have_count(100)
        await page.evaluate(
            """() => {
              window.touched = new Set();
              window.built = 0;
              const create = document.createElement.bind(document);
              document.createElement = (tag) => { window.built += tag === "small"; return create(tag); };
              const named = (node) => {
                const cell = (node.nodeType === 1 ? node : node.parentElement).closest("[data-title]");
                const row = cell?.closest("tr").querySelector("a").textContent;
                window.touched.add(`${row} ${cell?.dataset.title}`);
              };
              new MutationObserver((changes) => changes.forEach(({ target }) => named(target))).observe(
                document.getElementById("instances-rows"),
                { subtree: true, childList: true, attributes: true, characterData: true });
            }"""
        )
        for number, sessions in ((3, 7), (40, 8), (499, 9), (99, 10)):
            cluster.instances[f"node-{number:04}"]["sessions"] = sessions
        await expect(page.get_by_role("row", name="node-0099")).to_contain_text("10")
        cluster.instances["node-0005"]["draining"] = True
        await expect(page.get_by_role("row", name="node-0005")).to_contain_text("draining")
        assert sorted(await page.evaluate("[...window.touched]")) == [
            "node-0003 Workers",
            "node-0005 Actions",
            "node-0005 State",
            "node-0040 Workers",
            "node-0099 Workers",
        ]
        assert await page.evaluate("window.built") == 0, "each row has two, in cells that have not changed"


@pytest.mark.parametrize("by", ["pointer", "focus"])
async def test_rows_keep_their_places_while_somebody_is_among_them(visit: Visit, by: str) -> None:
    cluster = many(12)
    async with served(cluster) as url, visit(f"{url}#/instances?sort=-chunks") as page:
        rows = page.locator("#instances-rows tr")
        await expect(rows).to_have_count(12)
        before = await names(page, "instances")
        assert before == [f"node-{number:04}" for number in range(11, -1, -1)]
        drain = page.get_by_role("button", name="Drain node-0009")
        if by == "pointer":
            await drain.hover()
        else:
            await drain.focus()
        await expect(page.get_by_text("held", exact=True)).to_be_visible()
        box = await drain.bounding_box()
        cluster.instances["node-0000"]["keys"] = dict.fromkeys(TIERS, 1_000_000)
        del cluster.instances["node-0010"]
        cluster.instances["node-0011"]["confirmed"] = False
        cluster.instances["node-0900"] = one(900)
        cluster.instances["node-0900"]["keys"] = dict.fromkeys(TIERS, 2_000_000)
        await expect(page.get_by_role("row", name="node-0900")).to_be_visible()
        await expect(page.get_by_role("row", name="node-0000")).to_contain_text("4.00\u00a0M")
        await expect(page.get_by_role("row", name="node-0010")).to_have_count(0)
        held = await names(page, "instances")
        assert held == [*before, "node-0900"]
        await expect(page.locator("#instances-rows tr.ended")).to_have_count(1)
        await expect(page.get_by_role("button", name="Remove node-0010")).to_have_count(0)
        now = await drain.bounding_box()
        assert box and now and now["y"] == box["y"]
        await page.mouse.move(5, 5)
        await page.get_by_label("Filter instances").focus()
        await expect(rows.first).to_contain_text("node-0900")
        assert (await names(page, "instances"))[:3] == ["node-0900", "node-0000", "node-0011"]
        assert "node-0010" not in await names(page, "instances")


async def test_a_row_that_is_pointed_at_does_not_move_when_others_above_it_end(visit: Visit) -> None:
    cluster = many(300)
    async with served(cluster) as url, visit(f"{url}#/tiers") as page:
        row = page.locator("#tiers-each-rows tr").nth(8)
        await row.hover()
        await expect(page.get_by_text("held", exact=True)).to_be_visible()
        before, named = await row.bounding_box(), await row.inner_text()
        cluster.instances["node-0000"].update(state="dead")
        await expect(page.locator("#tiers-each-rows tr.ended")).to_have_count(4)
        assert await row.inner_text() == named
        after = await row.bounding_box()
        assert before and after and after["y"] == before["y"]
        cluster.instances["node-0000"].update(state="live")
        await expect(page.locator("#tiers-each-rows tr.ended")).to_have_count(0)
        assert await row.inner_text() == named


async def test_new_events_wait_while_somebody_points_at_the_log(visit: Visit) -> None:
    cluster = many(2)
    for number in range(150):
        cluster.tell("joined", "node-0000", host=f"host-{number}")
    async with served(cluster) as url, visit(f"{url}#/events") as page:
        lines = page.locator(".log li")
        await expect(lines).to_have_count(100)
        await lines.nth(3).hover()
        cluster.tell("died", "node-0001", silent_s=3.0)
        await expect(page.get_by_text("held, 1 new")).to_be_visible()
        await expect(lines.first).to_contain_text("host-149")
        await page.mouse.move(5, 5)
        await expect(lines.first).to_contain_text("silent")


# Sizes and colours do not depend on each other; each of both is seen once with so many rows.
@pytest.mark.parametrize(
    ("size", "theme"), [(chromium.DESK, "dark"), (PHONE, "light")], ids=["desk-dark", "phone-light"]
)
async def test_every_page_of_500_instances_fits_has_names_and_contrast(
    visit: Visit, size: tuple[int, int], theme: str
) -> None:
    cluster = many()
    for number in range(0, 500, 9):
        cluster.instances[f"node-{number:04}"].update(
            confirmed=False, sync={"state": "wanted", "wanted_because": "a gap in the events"}
        )
        cluster.tell("resync", f"node-{number:04}", reason="a gap in the events")
    cluster.removed += [f"gone-{number}" for number in range(60)]
    found = {}
    async with served(cluster) as url, visit(url, size, theme) as page:
        for path, rows in {
            "#/": "#attention-rows li",
            "#/instances": "#instances-rows tr",
            "#/instances?page=3&sort=-l1": "#instances-rows tr",
            "#/tiers?filter=disk": "#tiers-each-rows tr",
            "#/events": ".log li",
        }.items():
            await page.evaluate("(hash) => { location.hash = hash; }", path)
            await page.locator(rows).nth(19).wait_for()
            assert await page.locator(rows).count() <= 100
            found[path] = await page_checks.faults(page)
    assert {path: faults for path, faults in found.items() if faults} == {}


def random_state(chance: random.Random) -> State:
    """Some instances with some values."""
    rows = {
        name: {"id": name, "sessions": chance.randrange(3), "keys": {"l1": chance.randrange(3), "__proto__": 1}}
        for name in chance.sample(["a-0", "b-1", "b-10", "b-2", "__proto__", "constructor"], chance.randrange(6))
    }  # fmt: skip
    cluster = {"epoch": 7, "unix_ms": chance.randrange(3), "hits_total": {"miss": chance.randrange(3)}}
    return State(cluster, rows, {"drained": [], "removed": chance.sample(["x", "y"], chance.randrange(3))}, 0)


async def test_changes_lead_the_page_to_the_whole_state(visit: Visit) -> None:
    chance, clock = random.Random(20), itertools.count(1_000)
    now: list[State] = [random_state(chance)]
    feed = Feed(7, lambda: float(next(clock)), lambda: now[0], lambda _: [])
    feed.look()
    number, told, wanted = 0, [], []
    for _ in range(300):
        now[0] = random_state(chance)
        feed.look()
        if chance.random() < 0.2:
            number = 0  # it asks for a whole state
        while change := feed.after(number):
            number = change.number
            told.append(json.loads(change.body))
        wanted.append([len(told), now[0].cluster, sorted(now[0].instances.items()), now[0].lists["removed"]])
    async with served(many(1)) as url, visit(url) as page:
        shown: list[Any] = await page.evaluate(
            """async ([text, ends]) => {
              const changes = JSON.parse(text);
              const { NOTHING, applied } = await import("/dashboard/model.js");
              let known = NOTHING;
              let at = 0;
              return ends.map((end) => {
                for (; at < end; at += 1) known = applied(known, changes[at]);
                const names = [...known.instances.keys()];
                const rows = [...known.instances].sort(([one], [other]) => (one < other ? -1 : 1));
                return [names, JSON.stringify([end, known.cluster, rows, known.removed])];
              });
            }""",
            [json.dumps(told), [end for end, *_ in wanted]],
        )
        assert await page.evaluate(
            """async () => {
              const { NOTHING, applied } = await import("/dashboard/model.js");
              return applied(NOTHING, { after: "7-1", look: "7-2", cluster: {}, instances: {}, gone: [] });
            }"""
        ) is None  # fmt: skip
    for (order, text), expected in zip(shown, wanted, strict=True):
        assert json.loads(text) == json.loads(json.dumps(expected))
        plain = [name for name in order if name[1] == "-"]
        assert plain == sorted(plain, key=lambda name: (name[0], int(name[2:])))
