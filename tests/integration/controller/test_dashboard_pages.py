"""Single pages of the dashboard in real Chromium: instances, explorer, charts, events, metrics, runtime."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from tests.harness.dashboard_cluster import Cluster, gateway, instance, served
from tests.integration.controller.dashboard_scene import Visit, lookup, twelve

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


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


async def test_a_pressed_button_stays_in_its_place_until_it_is_released(visit: Visit) -> None:
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
        await expect(verdict).to_contain_text("Chunk 28 is the first that no instance has reported")
        await expect(verdict).to_contain_text("It was evicted to make room for others. (a-0: by lru)")
        await expect(page.get_by_role("row", name="7424 to 7679")).to_contain_text(
            "No request has named this"
        )
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
        await expect(verdict).to_contain_text("No instance has its first chunk")
    sent = {"tokens": [1, 2, 3], "model": "meta-llama/Llama-3.1-8B-Instruct"}
    assert [body for _, _, body in cluster.requests] == [sent] * 4


async def test_explorer_explains_a_request_by_its_id(visit: Visit) -> None:
    async with served(twelve()) as url, visit(f"{url}#/explorer", unanswered=True) as page:
        await page.get_by_role("button", name="Request id").click()
        await page.get_by_label("Request id", exact=True).fill("cmpl-1")
        await page.keyboard.press("Enter")
        await expect(page.locator(".verdict")).to_contain_text("16 of 24 chunks served")
        await expect(page.locator(".verdict")).to_contain_text(
            "It was evicted to make room for others. (by lru)"
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


async def test_a_short_peak_stays_visible_in_a_chart(visit: Visit) -> None:
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


async def test_the_overview_lists_the_gateways(visit: Visit) -> None:
    cluster = Cluster(instance("a-0", 0))
    cluster.gateways = [gateway("edge-1"), gateway("edge-2", host="fd00::2", heard_ago_s=65.0)]
    async with served(cluster) as url, visit(f"{url}#/") as page:
        rows = page.locator("section", has=page.get_by_role("heading", name="Gateways")).locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.nth(0)).to_contain_text("edge-1")
        await expect(rows.nth(0)).to_contain_text("3 of 4")
        await expect(rows.nth(0)).to_contain_text("now")
        await expect(rows.nth(1)).to_contain_text("[fd00::2]:8090")
        await expect(rows.nth(1)).to_contain_text("silent for")
        cluster.gateways = []
        await expect(page.get_by_text("No gateway asks this controller.")).to_be_visible()
