"""LMCache's commands, the connectors of its vLLM integration, and the paths of its HTTP ports."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvstrata.config.lmcache.fates import Fate, Name, each, kept, refused, replaced

COMMANDS: dict[str, Name] = {
    "lmcache server": kept("lmcache-server"),
    "lmcache_controller": kept("lmcache-controller"),
    "lmcache coordinator": replaced(
        "lmcache-controller", "it takes other flags; see lmcache-controller --help"
    ),
    "lmcache ping": replaced("kvstrata ctl ready", "it asks whether the server serves requests"),
    "lmcache describe": replaced("kvstrata ctl status", "it shows what the server holds and does"),
    "lmcache query": replaced("kvstrata ctl explain", "it tells why a recent request hit or missed"),
    "lmcache kvcache": replaced("kvstrata ctl clear", "it drops chunks of L1, L2 or both"),
    "lmcache quota": replaced("kvstrata ctl quota", "it sets how much of L1 a tenant may have"),
    "lmcache bench": replaced("kvstrata bench", "it measures a running server, an adapter or engines"),
    "lmcache memory": replaced("kvstrata ctl status", "it shows how much of L1 is used"),
    "lmcache trace": refused("nothing is recorded that could be replayed"),
    **dict.fromkeys(("lmcache tool", "lmcache mock"), refused("there are no such tools")),
    "lmcache_server": refused(
        "a store that several hosts share is an L2 adapter, such as resp (--l2-adapter), and instances of a cluster "
        "read from each other"
    ),
}
"""Commands of LMCache's distributions; `kvstrata names install` installs them."""

CONNECTORS: dict[str, tuple[str, ...]] = {
    "LMCacheConnectorV1": (),
    "LMCacheConnectorV1Dynamic": (
        "lmcache.integration.vllm.lmcache_connector_v1",
        "lmcache.integration.vllm.lmcache_connector_v1_085",
    ),
    "LMCacheMPConnector": ("lmcache.integration.vllm.lmcache_mp_connector",),
}
"""Values of `kv_connector`, each with the values of `kv_connector_module_path` that are published with it."""

_NO_THREADS = refused("no thread is listed; `kvstrata ctl status` shows what the server does")
_STATUS = replaced("GET /v1/status", "")
_OF_ENGINES = refused(
    "engines have no port of their own here; the server's GET /v1/status tells of all of them"
)

SERVER_PATHS: dict[str, Name] = {
    "/healthcheck": kept("GET /healthcheck"),
    "/metrics": kept("GET /metrics"),
    **each("/ /periodic-threads-health", replaced("GET /readyz", "it tells whether requests are served")),
    "/status": _STATUS,
    **each(
        "/version /lmc_version /commit_id", replaced("GET /openapi.json", "its info.version is kvstrata's")
    ),
    **each("/clear-cache /cache/clear", replaced("POST /v1/clear", "")),
    "/cache/objects": refused("chunks are not listed; GET /v1/status counts them"),
    "/cache/checksums": refused("every record has a checksum, which each load checks"),
    "/cache/prefetches": replaced("POST /v1/prefetch", ""),
    "/cache/prefetches/{request_id}": replaced("GET /v1/prefetch/{job}", ""),
    **each(
        "/quota /quota/{cache_salt}",
        replaced("PUT /v1/tenants/{tenant}/quota", 'its body is {"quota_gb": GB}'),
    ),
    **each("/conf /config", replaced("lmcache-server --check", "the command prints the settings")),
    **each("/config/adapters /reconfigure/{backend}/l2/status", replaced("GET /v1/l2/adapters", "")),
    "/reconfigure/{backend}/l2/{operation}": replaced("POST /v1/l2/adapters", ""),
    "/reconfigure/dax/l1/{operation}": refused(
        "L1 is shared memory, whose size is set by --l1-size-gb at the start"
    ),
    "/env": refused("a server shows no variables over HTTP"),
    "/loglevel": replaced("PUT /v1/log-level", 'its body is {"level": "debug"}'),
    "/metrics/reset": refused("counters begin at the start of the server"),
    **each("/threads /periodic-threads /periodic-threads/{thread_name}", _NO_THREADS),
    "/run_script": refused("the server runs no scripts"),
    **dict.fromkeys(
        ("/meta", "/backends", "/bypass", "/freeze", "/hot_cache", "/chunk_statistics"), _OF_ENGINES
    ),
    "/lookup/{name}": replaced("GET /v1/explain/{request_id}", "it tells why a recent request hit or missed"),
}
"""Paths of `lmcache server`; `target` is our path, command or flag."""

CONTROLLER_PATHS: dict[str, Name] = {
    "/query_instance": replaced("GET /v1/instances", ""),
    "/query_worker_info": replaced("GET /v1/instances/{name}", ""),
    "/lookup": replaced("POST /v1/lookup", ""),
    "/clear": replaced("POST /v1/clear", ""),
    "/pin": replaced("POST /v1/pin", ""),
    "/move": replaced("POST /v1/move", ""),
    **each("/compress /decompress", refused('the "codec" of an L2 adapter compresses its records')),
    "/health": replaced("GET /v1/instances", "it shows the state of each instance"),
    "/check_finish": replaced("GET /v1/commands/{number}", ""),
}
"""Paths of `lmcache_controller`."""


def path_advice(table: Mapping[str, Name], path: str) -> str:
    """What to ask instead of a path of LMCache; empty for any other path, and for those that we have."""
    for theirs, entry in table.items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", theirs), path) and entry.fate is not Fate.KEPT:
            return f"this is a path of LMCache; {advice(entry)}"
    return ""


def advice(entry: Name) -> str:
    """What to use instead of a command or path."""
    if entry.fate is Fate.REFUSED:
        return entry.say
    return f"use {entry.target}" + (f": {entry.say}" if entry.say else "")
