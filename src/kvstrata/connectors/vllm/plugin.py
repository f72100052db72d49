"""Entry point `vllm.general_plugins`: maps LMCache's connector names to our connector.

Published command lines name the connector without a module path, or with a module of the `lmcache` package.  vLLM takes
a bare name from its own table of connectors, whose entries of these names need that package too.  If the package is not
installed, or with `KVSTRATA_TAKEOVER=1`, the names and the modules are ours, and the log says so.

The modules are put into `sys.modules` under their full names only: importing `lmcache` itself still finds the installed
package, or none.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from types import ModuleType
from typing import Any

from kvstrata.config.lmcache import CONNECTORS

MODULE = "kvstrata.connectors.vllm"

logger = logging.getLogger("vllm.kvstrata")


def register() -> None:
    """Put our entries into vLLM's table. vLLM calls this in each of its processes, before it makes any connector."""
    takeover = os.environ.get("KVSTRATA_TAKEOVER", "")
    names = ", ".join(CONNECTORS)
    if takeover not in ("", "0", "1"):
        logger.warning("KVSTRATA_TAKEOVER is %r, which counts as 0; set it to 0 or 1", takeover)
    if takeover != "1" and importlib.util.find_spec("lmcache") is not None:
        logger.info(
            "%s are provided by the installed lmcache package; set KVSTRATA_TAKEOVER=1, or "
            '"kv_connector_module_path": "%s", to use kvstrata',
            names,
            MODULE,
        )
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry = KVConnectorFactory._registry
    if all(getattr(registry.get(name), "kvstrata", False) for name in CONNECTORS):
        return
    for name, modules in CONNECTORS.items():
        registry[name] = load
        for module in modules:
            sys.modules[module] = _Alias(module)
    logger.info("%s are provided by kvstrata", names)


def load() -> type:
    """Our connector's class."""
    from kvstrata.connectors.vllm import LMCacheConnectorV1

    return LMCacheConnectorV1


load.kvstrata = True  # type: ignore[attr-defined]


class _Alias(ModuleType):
    """A module under a name of the `lmcache` package that has our connectors."""

    def __getattr__(self, name: str) -> Any:
        if name in CONNECTORS:
            return load()
        raise AttributeError(f"module {self.__name__!r} is provided by kvstrata, which has no {name!r}")
