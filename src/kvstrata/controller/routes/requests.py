"""Bodies of requests to the controller's HTTP API."""

from __future__ import annotations

from array import array
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvstrata.controller.prompts import MAX_TOKENS
from kvstrata.process.http import long_list
from kvstrata.process.http_body import MAX_KEYS

MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 5.0
MAX_TTL_S = 86_400.0

Token = Annotated[int, Field(ge=0, lt=1 << 32)]
InstanceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class LoginBody(BaseModel):
    """A browser that logs in."""

    model_config = ConfigDict(extra="forbid")
    code: str = Field(
        max_length=4_096, description="The code of a link that has not been used, or the token of this port."
    )


class Wait(BaseModel):
    """A request that waits for instances."""

    model_config = ConfigDict(extra="forbid")
    wait_s: float = Field(
        DEFAULT_WAIT_S,
        ge=0,
        le=MAX_WAIT_S,
        description="Longest wait for the result; then the answer is 202.",
    )


class ChunksBody(BaseModel):
    """Chunks, named by a prompt's tokens or by keys."""

    model_config = ConfigDict(extra="forbid")
    tokens: (
        Annotated[
            list[Token],
            Field(max_length=MAX_TOKENS, fail_fast=True),
            long_list(array, MAX_TOKENS),
        ]
        | None
    ) = None
    keys: (
        Annotated[list[str], Field(max_length=MAX_KEYS, fail_fast=True), long_list(list, MAX_KEYS)] | None
    ) = Field(
        None,
        description="Storage keys in hexadecimal, instead of tokens.",
    )
    model: str = Field("", description="Model of an attached engine; empty: the only one.")
    kind: int | None = Field(None, description="Number in /v1/models, where several match.")
    adapter: str = Field("", description="Name of a LoRA adapter; empty: the model itself.")
    tenant: str = ""
    salt: str = ""


class LookupBody(ChunksBody):
    """A question where chunks are."""

    limit: int = Field(1_024, ge=1, le=65_536, description="Most chunks that are listed one by one.")


class PinBody(ChunksBody, Wait):
    """Chunks to be kept in L1."""

    instance: InstanceName | None = Field(
        None, description="Instance that keeps the chunks; by default the one with the longest prefix."
    )
    ttl_s: float = Field(3_600, gt=0, le=MAX_TTL_S)


class UnpinBody(Wait):
    """A pin to be ended."""

    claim: str = Field(max_length=64)
    instance: InstanceName | None = Field(None, description="Needed for pins that are not listed.")


class CopyBody(ChunksBody, Wait):
    """Chunks to be copied into another instance's L1."""

    to: InstanceName
    source: InstanceName | None = Field(None, description="By default the instance with the longest prefix.")


class ClearBody(Wait):
    """The chunks to drop."""

    tier: Literal["l1", "l2", "all"]
    tenant: str | None = None
    instances: list[InstanceName] | None = Field(None, description="By default all live instances.")


class EvictBody(ChunksBody, Wait):
    """The chunks to drop from L1."""

    instances: list[InstanceName] | None = Field(
        None, description="By default all instances that have some of these chunks."
    )
