"""Pages of other sites in a Chromium that is logged in to the dashboard of a real controller."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import async_playwright, expect

from tests.harness import chromium
from tests.harness.controller_process import ControllerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

KEY = "localStorage.getItem('kvstrata.token')"
# What a page of another site can send to a controller in which the browser is logged in.
ATTACK = """async (url) => {
  const told = async (way) => { try { await fetch(url, { credentials: "include", ...way }); } catch { /* refused */ } };
  const body = "{}";
  await told({ method: "POST", body, mode: "no-cors" });
  await told({ method: "POST", body, headers: { "Content-Type": "application/json" } });
  await told({ method: "POST", body, headers: { "Content-Type": "application/json", "Authorization": "Bearer x" } });
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


async def test_foreign_pages_cannot_act_with_the_session_of_the_browser(tmp_path: Path) -> None:
    program, environment = chromium.ensure()
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
            assert "login" not in page.url  # the token is gone from the address
            assert not await page.context.cookies()
            drain = f"{controller.url}/v1/instances/a/drain"
            # The first site is of the same host, the others are not.
            for site in ("127.0.0.1", "localhost", "evil.example"):
                await page.goto(f"http://{site}:{other}")
                answers.clear()
                await page.evaluate(ATTACK, drain)
                told = {status for url, status in answers if url == drain}
                assert told == {403}, (site, answers)
            assert not any(cookies)
            # The page's own scripts get through to the route: the attack fails by who sends it.
            await page.goto(f"{controller.url}/")
            own = f"fetch('{drain}', {{ method: 'POST', body: '{{}}', headers: {{ 'Content-Type': 'application/json', "
            status = await page.evaluate(
                f"{own} 'Authorization': 'Bearer ' + {KEY} }} }}).then((answer) => answer.status)"
            )
            assert status == 404
            await browser.close()
