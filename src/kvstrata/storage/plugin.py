"""The type `plugin`: an adapter class of any importable module, without an entry point."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.storage.base import StorageAdapter
from kvstrata.storage.config import Make, Medium, checked, plugin_boundary
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
    config_class_name: Annotated[
        Any, Meta(description="Refused: it names a class that was written for LMCache.")
    ] = None


def _prepare(config: PluginConfig, place: Place, name: str) -> Make:
    if config.config_class_name is not None:
        advice = (
            "classes for LMCache do not fit: write a StorageAdapter (docs/writing-an-adapter.md), which gets "
            "adapter_params as keyword arguments, and remove the field"
        )
        raise place.refused("config_class_name", config.config_class_name, advice)
    path, source = place.path, f"{config.module_path}.{config.class_name}"

    def make() -> StorageAdapter:
        with plugin_boundary(path, source):
            make_one = getattr(importlib.import_module(config.module_path), config.class_name)
            return checked(make_one(**config.adapter_params), path, source)

    return make


MEDIUM = Medium(PluginConfig, _prepare)
