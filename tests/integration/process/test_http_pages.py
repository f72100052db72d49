"""Web pages of other sites in a real Chromium: neither another origin nor DNS rebinding reaches an HTTP port."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import async_playwright

from tests.harness import chromium
from tests.harness.server_process import ServerProcess

PAGE = b"<!doctype html><title>page of another site</title>"
ATTACK = """async (url) => {
  const told = async (way) => { try { await fetch(url, way); } catch { /* refused */ } };
  const body = '{"tier": "all"}';
  await told({ method: "POST", body, mode: "no-cors" });
  await told({ method: "POST", body, headers: { "Content-Type": "application/json" } });
}"""


@contextlib.contextmanager
def other_site() -> Iterator[int]:
    """Serve an empty page on another port of this host; yield the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site.server_address[1]
        site.shutdown()


async def test_a_foreign_page_changes_nothing_even_on_an_open_port(tmp_path: Path) -> None:
    try:
        program, environment = chromium.ensure()
    except chromium.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    flags = [*chromium.FLAGS, "--host-resolver-rules=MAP *.example 127.0.0.1"]
    variables: dict[str, Any] = environment
    with ServerProcess(tmp_path, l1_mb=16, flags=("--insecure",)) as server, other_site() as other:
        server.start()
        port, answers = server.ready["http_port"], list[tuple[str, int]]()
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=program, args=flags, env=variables)
            page = await browser.new_page()
            page.on("response", lambda answer: answers.append((answer.request.method, answer.status)))
            for site in (f"http://localhost:{other}", f"http://evil.example:{other}"):
                await page.goto(site)
                answers.clear()
                await page.evaluate(ATTACK, f"http://127.0.0.1:{port}/v1/clear")
                await page.evaluate(ATTACK, f"http://localhost:{port}/v1/clear")
                assert answers and {status for _, status in answers} == {403}, (site, answers)
            # The name of the page now leads to the server: to the browser, both are one site.
            rebound = await page.goto(f"http://evil.example:{port}/healthz")
            assert rebound is not None and rebound.status == 200
            answers.clear()
            await page.evaluate(ATTACK, "/v1/clear")
            assert answers == [("POST", 403)] * 2
            # The port's own page may: the attack itself works where nothing forbids it.
            await page.goto(f"http://127.0.0.1:{port}/healthz")
            answers.clear()
            await page.evaluate(ATTACK, "/v1/clear")
            assert ("POST", 200) in answers
            await browser.close()
