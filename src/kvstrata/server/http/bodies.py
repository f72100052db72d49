"""Bodies of requests of the admin API, as pydantic models; its OpenAPI page is made from them."""

from __future__ import annotations

from array import array
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvstrata.process.http import long_list
from kvstrata.process.http_body import MAX_TOKENS


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
    tenant: str | None = Field(None, description="Only this tenant's chunks; with `l1` alone.")
    wait: bool = Field(
        False, description="Answer when the bytes of all dropped chunks are free, at most 30 s later."
    )


class ClearStrandedBody(BaseModel):
    """The stranded session whose extents no device writes any more."""

    model_config = ConfigDict(extra="forbid")
    session: str = Field(description="As listed, or `all`.", min_length=1, max_length=64)


class QuotaBody(BaseModel):
    """How much of L1 a tenant may have."""

    model_config = ConfigDict(extra="forbid")
    quota_gb: float = Field(description="In GB of 2^30 bytes.", gt=0, le=1 << 20)
