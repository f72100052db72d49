"""The type `plugin`: an adapter class of any importable module, without an entry point."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.config.secrets import scrubbed
from kvstrata.errors import ConfigError
from kvstrata.storage.base import StorageAdapter
from kvstrata.storage.catalogue import Make, Medium, checked
from kvstrata.storage.structs import Place


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A class of another package, by its name."""

    module_path: Annotated[str, Meta(min_length=1, description="Module to import.")]
    class_name: Annotated[str, Meta(min_length=1, description="The adapter's class in that module.")]
    adapter_params: Annotated[
        dict[str, Any],
        Meta(
            extra={"must": ", the keyword arguments of the class"},
            description="Keyword arguments of the class.",
        ),
    ] = {}


def _prepare(config: PluginConfig, place: Place, name: str) -> Make:
    path, source = place.path, f"{config.module_path}.{config.class_name}"

    def make() -> StorageAdapter:
        try:
            made = getattr(importlib.import_module(config.module_path), config.class_name)(
                **config.adapter_params
            )
        except Exception as error:  # the plugin boundary
            raise ConfigError(
                f"{path}: {source} cannot be made: {type(error).__name__}: {scrubbed(error)}", field=path
            ) from error
        return checked(made, path, source)

    return make


MEDIUM = Medium(PluginConfig, _prepare)
