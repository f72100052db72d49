"""Checks a page's accessibility: names and roles of controls, order of headings, contrast, size of targets.

It checks a small part of the rules of the tool axe. Names and roles are those of the browser's own accessibility tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.async_api import Page

NAMED_ROLES = {
    "button", "link", "textbox", "searchbox", "combobox", "listbox", "slider", "dialog", "alertdialog", "region",
    "navigation", "table", "group", "columnheader", "checkbox", "radio",
}  # fmt: skip
MIN_CONTRAST = 4.5
MIN_CONTRAST_LARGE = 3.0
MIN_TARGET_PX = 24
_FAULTS = Path(__file__).with_suffix(".js").read_text()


async def faults(page: Page) -> list[str]:
    """Return the faults of the page in its present state, as sentences."""
    found: list[str] = await page.evaluate(_FAULTS, [MIN_CONTRAST, MIN_CONTRAST_LARGE, MIN_TARGET_PX])
    session = await page.context.new_cdp_session(page)
    tree = await session.send("Accessibility.getFullAXTree")
    await session.detach()
    return found + [_unnamed(node) for node in tree["nodes"] if _is_unnamed(node)]


def _is_unnamed(node: dict[str, Any]) -> bool:
    if node.get("ignored"):
        return False
    focusable = any(
        each["name"] == "focusable" and each["value"].get("value") for each in node.get("properties", [])
    )
    role = node["role"]["value"]
    wanted = role in NAMED_ROLES or (focusable and role not in ("RootWebArea", "main", "generic"))
    return wanted and not node.get("name", {}).get("value", "").strip()


def _unnamed(node: dict[str, Any]) -> str:
    return f"a {node['role']['value']} without a name"
