"""What the child of an adapter host gets from its server when it begins."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from kvstrata.storage.base import AdapterContext
from kvstrata.storage.recipe import CodecConfig, Recipe
from kvstrata.storage.structs import Place


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Body of CONFIGURE: a Recipe (storage/recipe.py) and the other values that the host opens the adapter with."""

    medium: str
    config: msgspec.Raw
    """JSON of the medium's config struct."""
    place: Place
    name: str
    codec: CodecConfig
    """Holds the encryption key, if records are encrypted."""
    instance_id: str
    region_bytes: int
    import_paths: list[str]
    """The server's sys.path."""
    log_level: str


def host_config(recipe: Recipe, context: AdapterContext, log_level: int) -> HostConfig:
    """The configuration from which a child of this process makes the tier's inner layers."""
    return HostConfig(
        medium=recipe.medium,
        config=msgspec.Raw(msgspec.json.encode(recipe.config)),
        place=recipe.place,
        name=recipe.name,
        codec=recipe.codec,
        instance_id=context.instance_id,
        region_bytes=context.region_bytes,
        import_paths=[path or os.getcwd() for path in sys.path],
        log_level=logging.getLevelName(log_level),
    )
