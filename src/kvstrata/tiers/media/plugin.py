"""The type `plugin`: an adapter class of any importable module, without an entry point."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import msgspec

from kvstrata.config.common_model import says
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.config import Make, Medium, checked, plugin_boundary
from kvstrata.tiers.structs import Place


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A class of another package, by its name."""

    # fmt: off
    module_path: Annotated[str, says("Module to import.", min_length=1)]
    class_name: Annotated[str, says("The adapter's class in that module.", min_length=1)]
    adapter_params: Annotated[dict[str, Any], says(
        "Keyword arguments of the class.", extra={"must": ", the keyword arguments of the class"})] = {}
    config_class_name: Annotated[Any, says("Refused: it names a class that was written for LMCache.")] = None
    # fmt: on


def _prepare(config: PluginConfig, place: Place, name: str) -> Make:
    if config.config_class_name is not None:
        advice = (
            "LMCache's classes do not fit; write a StorageAdapter (docs/writing-an-adapter.md), which gets "
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
