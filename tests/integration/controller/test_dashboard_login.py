"""Logging in to the dashboard of a real controller, in real Chromium: by a link, once; what others get without one."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.harness import chromium, own_commands, page_checks
from tests.harness.cache_engine import eventually
from tests.harness.controller_process import ControllerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

FIELD = "Link, or the controller"
KEY = "localStorage.getItem('kvstrata.page-key')"
LINK = re.compile(r" dashboard open=(\S+) ")
# What a page of another site can send to a controller in which the browser is logged in.
ATTACK = """async (url) => {
  const told = async (way) => { try { await fetch(url, { credentials: "include", ...way }); } catch { /* refused */ } };
  const body = "{}";
  await told({ method: "POST", body, mode: "no-cors" });
  await told({ method: "POST", body, headers: { "Content-Type": "application/json" } });
  await told({ method: "POST", body, headers: { "Content-Type": "application/json", "kvstrata-page-key": "x" } });
  await told({ mode: "no-cors" });
  const form = Object.assign(document.createElement("form"), { method: "post", action: url, target: "frame" });
  document.body.append(Object.assign(document.createElement("iframe"), { name: "frame" }), form);
  form.submit();
  await new Promise((done) => { document.querySelector("iframe").onload = done; });
}"""


class OtherSite(http.server.BaseHTTPRequestHandler):
    """A page of another user's server; `cookies` are those that browsers have sent it."""

    cookies: list[str]

    def do_GET(self) -> None:
        self.cookies.append(self.headers.get("cookie", ""))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>page of another site</title><body></body>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def other_site() -> Iterator[tuple[int, list[str]]]:
    """Serve an empty page on another port of this host; yield the port and the cookies that it gets."""
    handler = type("Handler", (OtherSite,), {"cookies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site.server_address[1], handler.cookies
        site.shutdown()


def status_of(controller: ControllerProcess, path: str, cookie: str = "", key: str = "") -> int:
    """Status of a GET with these secrets of a session."""
    link = http.client.HTTPConnection("127.0.0.1", controller.http_port, timeout=30)
    link.request("GET", path, headers={"Cookie": cookie, "kvstrata-page-key": key})
    status = link.getresponse().status
    link.close()
    return status


def link_of_ctl(controller: ControllerProcess) -> str:
    """The link that `kvstrata ctl` prints."""
    words = ("ctl", "--url", controller.url, "cluster", "dashboard-link")
    return own_commands.run("kvstrata", *words).stdout.strip()


async def secrets(page: Page) -> tuple[str, str]:
    """The session's cookie, as a request carries it, and its page key."""
    (cookie,) = await page.context.cookies()
    return f"{cookie['name']}={cookie['value']}", str(await page.evaluate(KEY))


async def test_link_of_the_log_logs_in_and_leaves_no_trace_of_its_code(
    browser: Browser, controller: ControllerProcess
) -> None:
    (link,) = eventually("the log has the link", lambda: LINK.findall(controller.log.read_text()))
    assert link.startswith(f"http://localhost:{controller.http_port}/#/login/")
    context = await browser.new_context()
    page = await context.new_page()
    code, sent = link.rpartition("/")[2], list[str]()
    page.on("request", lambda request: sent.append(f"{request.url.partition('#')[0]} {request.headers}"))
    await page.goto(link)
    await expect(page.locator("#connection.live")).to_be_visible()
    assert page.url == f"http://localhost:{controller.http_port}/#/"
    assert code not in "".join(sent) and "/v1/login" in "".join(sent)
    (cookie,) = await context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
    kept, key = await secrets(page)
    assert status_of(controller, "/v1/cluster", kept, key) == 200
    for wrong in ((kept, ""), ("", key), (kept, "x"), ("kvstrata=x", key)):
        assert status_of(controller, "/v1/cluster", *wrong) == 401
    await page.reload()
    await expect(page.locator("#connection.live")).to_be_visible()
    await context.close()


async def test_link_works_once(browser: Browser, controller: ControllerProcess) -> None:
    link = link_of_ctl(controller)
    assert link.startswith(f"{controller.url}/#/login/")
    async with chromium.visit(browser, f"{controller.url}/", link=link):
        pass
    assert link.rpartition("/")[2] not in controller.log.read_text()
    async with chromium.visit(browser, link, unanswered=True, live=False) as page:
        await expect(page.get_by_role("alert")).to_contain_text("unknown, used before or too old")
        assert await page_checks.faults(page) == []
        await page.get_by_label(FIELD).fill(controller.dashboard_link())
        await page.get_by_role("button", name="Log in").click()
        await expect(page.locator("#connection.live")).to_be_visible()
        assert await page.evaluate("location.hash") == "#/"


async def test_link_that_another_tab_opens_logs_this_one_in_and_a_logout_ends_both(
    browser: Browser, controller: ControllerProcess
) -> None:
    async with chromium.visit(browser, f"{controller.url}/#/events", unanswered=True, live=False) as page:
        await expect(page.get_by_label(FIELD)).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_be_visible()
        other = await page.context.new_page()
        await other.goto(controller.dashboard_link())
        for each in (other, page):
            await expect(each.locator("#connection.live")).to_be_visible()
        await expect(page.get_by_role("heading", name="Events")).to_be_visible()
        await page.set_viewport_size({"width": 390, "height": 800})
        assert await page_checks.faults(page) == []
        kept, key = await secrets(page)
        stream = http.client.HTTPConnection("127.0.0.1", controller.http_port, timeout=30)
        stream.request("GET", "/v1/live", headers={"Cookie": kept, "kvstrata-page-key": key})
        assert (told := stream.getresponse()).status == 200
        await other.get_by_role("button", name="Log out").click()
        await expect(other.get_by_role("dialog")).to_be_visible()
        assert told.read().startswith(b"id: ")  # to its end
        stream.close()
        assert status_of(controller, "/v1/cluster", kept, key) == 401
        assert await other.evaluate(KEY) is None and await page.context.cookies() == []
        await expect(page.get_by_role("dialog")).to_be_visible()


async def test_address_typed_into_an_open_page_logs_in(
    browser: Browser, controller: ControllerProcess
) -> None:
    async with chromium.visit(browser, f"{controller.url}/#/tiers", unanswered=True, live=False) as page:
        await expect(page.get_by_role("dialog")).to_be_visible()
        await page.evaluate("(link) => { location = link; }", controller.dashboard_link())
        await expect(page.locator("#connection.live")).to_be_visible()
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_session_gets_no_further_link(browser: Browser, controller: ControllerProcess) -> None:
    url, link = f"{controller.url}/", controller.dashboard_link()
    async with chromium.visit(browser, url, link=link, unanswered=True) as page:
        status = await page.evaluate(
            f"fetch('/v1/dashboard-link', {{ method: 'POST', headers: {{ 'kvstrata-page-key': {KEY} }} }})"
            ".then((answer) => answer.status)"
        )
        assert status == 403


async def test_foreign_pages_cannot_act_with_the_session_of_the_browser(tmp_path: Path) -> None:
    try:
        program, environment = chromium.ensure()
    except chromium.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    flags = [*chromium.FLAGS, "--host-resolver-rules=MAP *.example 127.0.0.1"]
    variables: dict[str, Any] = environment
    with ControllerProcess(tmp_path) as controller, other_site() as (other, cookies):
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=program, args=flags, env=variables)
            page = await browser.new_page()
            answers = list[tuple[str, int]]()
            page.on("response", lambda answer: answers.append((answer.request.url, answer.status)))
            await page.goto(controller.dashboard_link())
            await expect(page.locator("#connection.live")).to_be_visible()
            kept, key = await secrets(page)
            drain = f"{controller.url}/v1/instances/a/drain"
            # The first site is of the same host, to which browsers do send the cookie; the others are not.
            for site in ("127.0.0.1", "localhost", "evil.example"):
                await page.goto(f"http://{site}:{other}")
                answers.clear()
                await page.evaluate(ATTACK, drain)
                told = {status for url, status in answers if url == drain}
                assert told == {403}, (site, answers)
            assert kept in cookies  # so the cookie alone must prove nothing
            assert status_of(controller, "/v1/cluster", kept) == 401
            # The page's own scripts get through to the route: the attack fails by who sends it.
            await page.goto(f"{controller.url}/")
            own = f"fetch('{drain}', {{ method: 'POST', body: '{{}}', headers: {{ 'Content-Type': 'application/json', "
            status = await page.evaluate(
                f"{own} 'kvstrata-page-key': {KEY} }} }}).then((answer) => answer.status)"
            )
            assert status == 404
            assert status_of(controller, "/v1/cluster", kept, key) == 200
            await browser.close()
