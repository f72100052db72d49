"""A real Chromium for tests: one on PATH, else Debian's package in the cache folder, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.tools import fetch_debian

PACKAGES = ("chromium", "fonts-dejavu-core")
NAMES = ("chromium", "chromium-browser", "google-chrome")
DESK = (1280, 860)
WAIT_MS = 30_000
"""Longest wait for a page to show something; the machine may be busy."""
# Tests run as root in containers, where Chromium has no sandbox; they load only their own pages.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")

expect.set_options(timeout=WAIT_MS)


def ensure() -> tuple[Path, dict[str, str]]:
    """Return Chromium's program and the variables it needs; fetch it on the first call. Raises Unavailable."""
    for name in NAMES:
        found = shutil.which(name)
        if found and fetch_debian.why_not(found, dict(os.environ)) is None:
            return Path(found), dict(os.environ)
    program, variables = fetch_debian.program(
        "chromium", PACKAGES, inside="usr/lib/chromium/chromium", variables=_variables
    )
    return Path(program), variables


def _variables(root: Path) -> dict[str, str]:
    environment = fetch_debian.environment(root)
    own = [root / "usr" / "lib" / "chromium", *(root / "usr" / "lib").glob("*-linux-gnu*/pulseaudio")]
    environment["LD_LIBRARY_PATH"] = ":".join([*map(str, own), environment["LD_LIBRARY_PATH"]])
    environment["FONTCONFIG_PATH"] = str(root / "etc" / "fonts")
    return environment


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run Chromium until the end of the block. Raises Unavailable."""
    program, environment = ensure()
    variables: dict[str, Any] = environment
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=program, args=list(FLAGS), env=variables)
        try:
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def visit(browser: Browser, url: str, live: bool = True, link: str = "") -> AsyncIterator[Page]:
    """Open a page in a browser context of its own; assert at the end that it logged no error and asked no other host.

    With `live`, wait until the dashboard has its stream.  `link` logs the browser in first.
    """
    errors: list[str] = []
    origin = urlsplit(url)._replace(path="", query="", fragment="").geturl()

    def told(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            errors.append(message.text)

    context = await browser.new_context(
        viewport={"width": DESK[0], "height": DESK[1]}, color_scheme="light", reduced_motion="reduce"
    )
    try:
        context.set_default_timeout(WAIT_MS)
        page = await context.new_page()
        page.on("console", told)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: request.url.startswith(origin) or errors.append(request.url))
        if link:
            await page.goto(link)
            await expect(page.get_by_role("button", name="Log out")).to_be_visible()
        await page.goto(url)
        if live:
            await expect(page.locator("#connection.live")).to_be_visible()
        yield page
    finally:
        await context.close()
    assert errors == []
