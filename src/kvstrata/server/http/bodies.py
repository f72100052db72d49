"""Bodies of requests and answers of the admin API, as pydantic models; its OpenAPI page is made from them."""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvstrata.process.http import long_list
from kvstrata.process.http_body import MAX_TOKENS

MAX_WAIT_S = 600.0
DEFAULT_WAIT_S = 10.0


class PrefetchBody(BaseModel):
    """A prompt to load into L1 before any user asks."""

    model_config = ConfigDict(extra="forbid")
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=1 << 32)]],
        Field(max_length=MAX_TOKENS, fail_fast=True),
        long_list(array, MAX_TOKENS),
    ]
    model: str = Field("", description="Model of an attached engine; empty: the only one.")
    adapter: str = Field("", description="Name of a LoRA adapter; empty: the model itself.")
    tenant: str = ""
    salt: str = ""
    budget_bytes: int = Field(1 << 30, gt=0, description="Maximum number of bytes to load.")
    ttl_ms: int = Field(60_000, gt=0, le=3_600_000, description="Time after which no more is loaded.")


class ClearBody(BaseModel):
    """The chunks to drop."""

    model_config = ConfigDict(extra="forbid")
    tier: Literal["l1", "l2", "all"]
    tenant: str | None = None
    wait: bool = Field(
        False, description="Answer when the bytes of all dropped chunks are free, at most 30 s later."
    )


class ClearAnswer(BaseModel):
    """How many chunks were dropped, and whose bytes are still in use."""

    cleared: dict[Literal["l1", "l2"], int] = Field(
        description="Chunks that left each tier: no lookup finds them any more."
    )
    pending: dict[Literal["held", "leased"], int] = Field(
        description="Chunks dropped from L1, now or before, whose bytes are still in use: `held` by a put or a read of "
        "the server, `leased` by an engine. They are free when that use ends."
    )
    kept: dict[Literal["pinned", "unknown"], int] = Field(
        description="Chunks that stay: `pinned` in L1 through the controller, or being read there by another instance; "
        "`unknown` in L2, of a tenant that this server does not know (only if one tenant is cleared)."
    )


class ClearStrandedBody(BaseModel):
    """The stranded session whose extents no device writes any more."""

    model_config = ConfigDict(extra="forbid")
    session: str = Field(description="As listed, or `all`.", min_length=1, max_length=64)


class QuotaBody(BaseModel):
    """How much of L1 a tenant may have."""

    model_config = ConfigDict(extra="forbid")
    quota_gb: float = Field(description="In GB of 2^30 bytes.", gt=0, le=1 << 20)


class AddAdapterBody(BaseModel):
    """An L2 adapter to open in a running server."""

    model_config = ConfigDict(extra="forbid")
    adapter: dict[str, Any] | Annotated[str, Field(max_length=200)] = Field(
        description="The JSON that `--l2-adapter` takes, or the name of an adapter of the settings, such as `fs-0`."
    )
    position: int | None = Field(
        None, ge=0, description="Place in the order in which lookups ask, from 0; by default the last."
    )
    backfill: bool = Field(
        False,
        description="Offer it all chunks of L1 once; otherwise it gets those that its policy chooses from now on.",
    )


class DrainAdapterBody(BaseModel):
    """How an adapter is drained."""

    model_config = ConfigDict(extra="forbid")
    loads: bool = Field(True, description="Lookups go on asking the adapter and loading from it.")
    wait_s: float = Field(
        DEFAULT_WAIT_S,
        ge=0,
        le=MAX_WAIT_S,
        description="Longest wait before the answer; draining goes on after it.",
    )


class ResumeAdapterBody(BaseModel):
    """How a drained adapter comes back into use."""

    model_config = ConfigDict(extra="forbid")
    backfill: bool = Field(
        False,
        description="Offer it all chunks of L1 once; otherwise chunks that were skipped meanwhile are not put.",
    )
