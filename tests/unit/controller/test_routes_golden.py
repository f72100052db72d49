"""Every route of a server's and a controller's HTTP port: what it answers, against routes_golden.txt.

A line `> METHOD PATH BODY` is a request with the token to the port that the last line `# …` names. Its answer follows:
the status, and the shape of the JSON (without texts and numbers), or the whole body of an error.
With REWRITE in the environment the test writes all answers anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstrata.config.common_model import ListenSettings
from kvstrata.controller.admin import OPERATIONS, Admin
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.dashboard_files import DashboardFiles
from kvstrata.controller.metrics import Surroundings, sections
from kvstrata.controller.operations import Operations
from kvstrata.controller.process import PUBLIC
from kvstrata.errors import NotFound, Refused, Unavailable
from kvstrata.observability.explain import Explained
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Pages
from kvstrata.process.http_gate import PROBES, Access
from kvstrata.process.http_thread import Port, make_port
from kvstrata.process.keeper import NOT_RESTARTED
from kvstrata.process.operations import Claiming
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.control_port import ControlPort
from kvstrata.server.admin import operations as server
from kvstrata.server.admin.clear import Cleared
from kvstrata.server.admin.prewarm import Job
from kvstrata.server.claims import Claim
from tests.harness.instance_in_process import InstanceInProcess
from tests.harness.known_members import joined, tell

GOLDEN = Path(__file__).with_name("routes_golden.txt")
TOKEN, LISTEN = "t" * 32, ListenSettings(open_metrics=False)
BEARER = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}


def admin(ready: bool) -> Any:
    """Parts of an instance: its status document is real, the other parts answer with plain values."""

    async def prewarm(ask: server.Prompt) -> Job:
        if ask.model:
            raise Unavailable(f"model: nobody attached with {ask.model!r}", field="model")
        return job

    def job_of(number: int) -> Job:
        if number != job.job:
            raise NotFound(f"job: {number} is not a recent prewarm")
        return job

    async def clear(tier: str, tenant: str | None, *, wait: bool) -> Cleared:
        return Cleared({tier: 3}, held=0, leased=1, kept=4)

    async def claim_prompt(asked: Claiming) -> Claim:
        if asked.tenant:
            raise Refused("no_room: 3 bytes may still be claimed")
        return claimed

    async def release(name: str) -> Claim | None:
        return claimed if name == claimed.claim else None

    async def rows() -> list[dict[str, Any]]:
        return [{"name": "fs-0"}]

    async def clear_stranded(sessions: list[bytes] | None) -> list[Any]:
        return [stranded]

    async def hint(request_id: str, next_: int) -> int:
        return next_

    job = Job(job=7, begun_s=0.0)
    claimed = Claim("c", "", b"", 1, [], b"", 2, 1, 1)
    stranded = SimpleNamespace(session=b"ab", group_name=b"", pid=1, row=0, kept_bytes=2)
    processes = SimpleNamespace(stranded=lambda: [stranded], clear_stranded=clear_stranded)
    instance, tiers = InstanceInProcess(), {"fs-0": {"name": "fs-0"}}
    document = instance.status()
    instance.close()
    for name in ("cmpl-7-0-ab", "cmpl-7-1-ab", "chat/1"):
        instance.parts.explainer.lookups.append(
            Explained(name, "", bytes(32), 0, 1.5, 1, 1, 0, 1, "", "", b"")
        )
    parts = SimpleNamespace(
        readiness=lambda: (ready, "" if ready else "adopting the pool"),
        board=SimpleNamespace(document=lambda: document),
        explainer=instance.parts.explainer,
        prewarms=SimpleNamespace(prewarm=prewarm, job=job_of),
        clearing=SimpleNamespace(clear=clear),
        claims=SimpleNamespace(
            claim_prompt=claim_prompt, release=release, listed=lambda: {"claims": [claimed.document()]}
        ),
        processes=processes,
        requests=SimpleNamespace(lookups=SimpleNamespace(hint=hint)),
        tiers=SimpleNamespace(rows=rows, pause=tiers.get, resume=tiers.get, names=lambda: list(tiers)),
        set_quota=lambda tenant, quota_bytes: tenant != "crowd",
    )
    return server.Admin(parts, Pages(list).page, EventLog("server"))  # type: ignore[arg-type]


async def controller(cluster: Cluster, supervisor: Supervisor) -> Port:
    """The port of a controller with the instances `a`, which has a chunk, and `b`."""
    for name in "ab":
        where, version = f"tcp://{name}:1", wire.CLUSTER_PROTOCOL_VERSION
        told = wire.Register(1, version, name, 1, "", ["l1"], 1 << 30, 16, where, "", True, "", name, 1)
        member = joined(cluster, told)
        if name == "a":
            await tell(cluster, member, wire.Run(wire.Change.ADMIT, "l1", wire.tags_of(bytes(range(32)))))
    cluster.set_ready()
    access = Access(LISTEN, TOKEN, public=PUBLIC, pages=["/"])
    orders = Operations(cluster, supervisor)
    around = Surroundings(ControlPort(asyncio.get_running_loop(), 1), 8400, list, None, NOT_RESTARTED)
    page = Pages(lambda: sections(cluster, around)).page
    url, log = "http://localhost:9000", EventLog("controller")
    parts = Admin(cluster, orders, around, url, page, DashboardFiles(), log)
    return await make_port("controller", OPERATIONS, parts, access)


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return "…" if isinstance(value, str) else 0 if type(value) in (int, float) else value


def shown(answer: Any) -> str:
    body = answer.headers.get("content-type", "").partition(";")[0]
    if body == "application/json" and answer.content:
        body = answer.json()
        if answer.status_code < 400:
            body = sorted(body["paths"]) if "openapi" in body else shape(body)
    return f"{answer.status_code} {json.dumps(body, ensure_ascii=False, sort_keys=True)}\n"


async def requests(port: str, made: Port) -> AsyncIterator[str]:
    import httpx

    transport = httpx.ASGITransport(made.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:9000") as http:
        for line in (line for line in port.splitlines() if line.startswith("> ")):
            method, path, *body = line[2:].split(" ", 2)
            sent = "".join(body).replace("<lone>", "\udfff").encode(errors="surrogatepass")
            answer = await http.request(method, path, headers=BEARER, content=sent)
            yield f"{line}\n{shown(answer)}"
        described_paths = (await http.get("/openapi.json", headers=BEARER)).json()["paths"]
        for path, operations in described_paths.items() if "not ready" not in port else ():
            for method, described in operations.items():
                known = re.sub(r"{[^}]*}", "[^? ]+", path)
                assert re.search(f"> {method.upper()} {known}[? \n]", port), "no line has this route: " + path
                refused = (await http.request(method, path)).status_code == 401
                assert refused == ("security" in described) == (path not in PROBES), path
                assert described["description"] and {"4XX", "5XX"} <= described["responses"].keys(), path


async def test_every_route_answers_as_before_and_is_described_and_needs_the_token(cluster: Cluster) -> None:
    supervisor, log, found = Supervisor(asyncio.get_running_loop()), logging.getLogger("kvstrata"), ""
    level = log.level
    for port in GOLDEN.read_text().split("# ")[1:]:
        name = port.partition("\n")[0]
        if name == "controller":
            made = await controller(cluster, supervisor)
        else:
            parts = await asyncio.to_thread(admin, name == "server")
            made = await make_port("server", server.OPERATIONS, parts, Access(LISTEN, TOKEN))
        found += f"# {name}\n" + "".join([one async for one in requests(port, made)])
    log.setLevel(level)
    await supervisor.stop()
    if "REWRITE" in os.environ:
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()
