"""Settings of a process that attaches to a server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import LIMIT


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a process that attaches to a server (the vLLM connector and other clients)."""

    host: Annotated[str, Meta(min_length=1, description="Host of the server; must be this host.")] = (
        "localhost"
    )
    port: Annotated[int, Meta(ge=1, le=65_535, description="RPC port of the server.")] = 5555
    socket_dir: Annotated[
        str,
        Meta(description="Directory of the server's sockets; empty: each default place (docs/protocol.md)."),
    ] = ""
    chunk_size: Annotated[int, Meta(ge=1, le=65_536, description="Tokens in a chunk.")] = 256
    lookup_timeout_ms: Annotated[
        int,
        Meta(
            extra=LIMIT,
            ge=1,
            le=60_000,
            description="Longest wait for a request's lookup, which is a miss after that.",
        ),
    ] = 3_000
    min_retrieve_tokens: Annotated[
        int, Meta(ge=0, description="A hit with fewer tokens than this is computed instead of loaded.")
    ] = 0
    save_decode_cache: Annotated[bool, Meta(description="Store chunks made of generated tokens too.")] = False
    save_unfull_chunk: Annotated[
        bool,
        Meta(
            description="Store the unfinished last chunk of a prompt too, up to the engine's last full block, so that "
            "hits reach it. Models with sliding windows or states store whole chunks only."
        ),
    ] = True
    enable_kv_events: Annotated[
        bool, Meta(description="Hand stored and removed chunks to vLLM as events.")
    ] = False
    engine_url: Annotated[
        str,
        Meta(
            max_length=256,
            pattern=r"^(|https?://[^\s/?#@]+:[0-9]{1,5})$",
            extra={"demand": "must be empty, http://HOST:PORT or https://HOST:PORT"},
            description="Where gateways reach this engine over HTTP. By it the gateways that ask `controllers` "
            "know which server the engine is attached to. Empty: it is not known by its URL.",
        ),
    ] = ""
    load_mode: Annotated[
        Literal["auto", "sync", "async"],
        Meta(
            description="When hits are loaded: `sync` before the forward pass, `async` beside it, `auto` as their "
            "size suggests. If vLLM plans a step before the previous one has ended (asynchronous scheduling, pipeline "
            "parallelism), `sync` is refused and `auto` loads beside the pass."
        ),
    ] = "auto"
    tenant: Annotated[
        str, Meta(description="Tenant of this engine's requests, except those that name another one.")
    ] = ""
    request_tenants: Annotated[
        list[Annotated[str, Meta(max_length=256)]],
        Meta(
            max_length=4096,
            description="Other tenants that a request may name by `kvstrata.tenant` in its `kv_transfer_params`. On a "
            "server with a tenants file, the token in `token_file` must open them too.",
        ),
    ] = []
    token_file: Annotated[
        str,
        Meta(
            description="File with the token that permits `tenant` on a server with a tenants file; readable by its "
            "owner only, read again at every attach. Empty: no token."
        ),
    ] = ""
    fidelity: Annotated[
        Literal["lossless", "fp8"],
        Meta(
            description="`fp8`: round 16-bit KV on the GPU to 8-bit floats while it is stored, so that the link, L1 "
            "and L2 carry half the bytes. Engines with different settings share no chunks."
        ),
    ] = "lossless"
    gpu_copy_engine: Annotated[
        Literal["auto", "dma", "kernel"],
        Meta(
            description="How KV is copied between a GPU and the pool: `dma`: batched copies that use no SM; `kernel`: "
            "a kernel that accesses host memory; `auto`: `dma` for contiguous runs of at least 32 KB, else `kernel`."
        ),
    ] = "auto"
    max_store_backlog_gb: Annotated[
        float,
        Meta(gt=0, description="Most bytes waiting to be copied into the pool; further stores are skipped."),
    ] = 1.0
