"""Settings of a process that attaches to a server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import says

# fmt: off


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a process that attaches to a server (the vLLM connector and other clients)."""

    port: Annotated[int, says("RPC port of the server.", ge=1, le=65_535)] = 5555
    socket_dir: Annotated[str, says(
        "Directory of the server's sockets; empty: each default directory is tried (docs/internals/protocol.md).")] = ""
    chunk_size: Annotated[int, says("Tokens in a chunk.", ge=1, le=65_536)] = 256
    lookup_timeout_ms: Annotated[int, says(
        "Maximum wait for a request's lookup; after that it is a miss.", limit=True, ge=1, le=60_000)] = 3_000
    save_decode_cache: Annotated[bool, says("Also store chunks of generated tokens.")] = False
    save_unfull_chunk: Annotated[bool, says(
        "Also store the unfinished last chunk of a prompt, up to the engine's last full block, so that hits reach "
        "it. Models with sliding windows or states store only whole chunks.")] = True
    store: Annotated[Literal["auto", "commit", "late"], says(
        "When chunks are stored: `commit`: as soon as they are complete; `late`: when vLLM is about to reuse their "
        "blocks, so that L1 extends vLLM's own cache instead of duplicating it; `auto`: late while L1 is smaller "
        "than twice the KV caches of all engines of its server. Models with sliding windows or states always store "
        "at once.")] = "commit"
    await_siblings: Annotated[bool, says(
        "Let a request wait for the part of its prompt that another engine of this server is computing, if that "
        "should be faster than computing it here; and announce to other engines what this engine computes.")] = True
    enable_kv_events: Annotated[bool, says("Report stored and removed chunks to vLLM as events.")] = False
    engine_url: Annotated[str, says(
        "URL at which gateways reach this engine over HTTP. Gateways with `controllers` use it to find the server "
        "that the engine is attached to. Empty: they cannot.",
        max_length=256, pattern=r"^(|https?://[^\s/?#@]+:[0-9]{1,5})$",
        demand="must be empty, http://HOST:PORT or https://HOST:PORT")] = ""
    load_mode: Annotated[Literal["auto", "sync", "async"], says(
        "When hits are loaded: `sync` before the forward pass, `async` in parallel with it, `auto` by their size. If "
        "vLLM plans a step before the previous one has ended (asynchronous scheduling, pipeline parallelism), `sync` "
        "is refused and `auto` means `async`.")] = "auto"
    tenant: Annotated[str, says("Tenant of this engine's requests, except requests that name another tenant.")] = ""
    request_tenants: Annotated[list[Annotated[str, Meta(max_length=256)]], says(
        "Other tenants that a request may name by `kvstrata.tenant` in its `kv_transfer_params`. On a server with a "
        "tenants file, the token in `token_file` must open them too.", max_length=4096)] = []
    token_file: Annotated[str, says(
        "File with the token that permits `tenant` on a server with a tenants file; readable by its owner only, "
        "reread at every attach. Empty: no token.")] = ""
    fidelity: Annotated[Literal["lossless", "fp8"], says(
        "`fp8`: round 16-bit KV on the GPU to 8-bit floats during stores, which halves the bytes on the link and in "
        "L1 and L2. Engines with different settings share no chunks.")] = "lossless"
