"""The files of the dashboard, without a browser."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.harness.controller_process import ControllerProcess

pytestmark = pytest.mark.integration


async def test_every_file_is_small_local_and_under_a_strict_policy(controller: ControllerProcess) -> None:
    async with httpx.AsyncClient(base_url=controller.url) as client:
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
        assert {"/dashboard/main.js", "/dashboard/style.css", "/dashboard/pages.js"} <= seen.keys()
        assert sum(seen.values()) < 60_000
        for path in (
            "/dashboard/../app.py",
            "/dashboard/%2e%2e/app.py",
            "/dashboard/nothing.js",
            "/dashboard",
        ):
            assert (await client.get(path)).status_code in (401, 404), path
