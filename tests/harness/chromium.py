"""A real Chromium for tests: Debian's package in the cache folder, else one on PATH, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, async_playwright

from tests.harness import fetch_debian

PACKAGES = ("chromium", "fonts-dejavu-core")
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Tests run as root in containers; they load nothing but pages of their own.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class Unavailable(Exception):
    """There is no Chromium here; the message says which line installs one."""


def ensure() -> tuple[Path, dict[str, str]]:
    """Its program and the variables it needs; fetched on the first call. Raises Unavailable."""
    try:
        root = fetch_debian.ensure(PACKAGES)
    except fetch_debian.Unavailable as unavailable:
        for name in NAMES:
            found = shutil.which(name)
            if found:
                return Path(found), dict(os.environ)
        raise Unavailable(str(unavailable)) from None
    environment = fetch_debian.environment(root)
    own = [root / "usr" / "lib" / "chromium", *(root / "usr" / "lib").glob("*-linux-gnu*/pulseaudio")]
    environment["LD_LIBRARY_PATH"] = ":".join([*map(str, own), environment["LD_LIBRARY_PATH"]])
    environment["FONTCONFIG_PATH"] = str(root / "etc" / "fonts")
    return root / "usr" / "lib" / "chromium" / "chromium", environment


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A running one. Raises Unavailable."""
    program, environment = ensure()
    variables: dict[str, Any] = environment
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=program, args=list(FLAGS), env=variables)
        try:
            yield running
        finally:
            await running.close()
