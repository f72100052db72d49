"""Entry point `vllm.general_plugins`: makes the bare name `LMCacheConnectorV1` mean our connector.

Published command lines name the connector without a module path.  vLLM then takes it from its own table of connectors,
whose entry of that name needs the `lmcache` package.  If that package is not installed, or with `KVSTRATA_TAKEOVER=1`,
our entry replaces the other one, and the log says so.
"""

from __future__ import annotations

import importlib.util
import logging
import os

NAME = "LMCacheConnectorV1"
MODULE = "kvstrata.connectors.vllm"

logger = logging.getLogger("vllm.kvstrata")


def register() -> None:
    """Put our entry into vLLM's table. vLLM calls this in each of its processes, before it makes any connector."""
    takeover = os.environ.get("KVSTRATA_TAKEOVER", "")
    if takeover not in ("", "0", "1"):
        logger.warning("KVSTRATA_TAKEOVER is %r, which counts as 0; set it to 0 or 1", takeover)
    if takeover != "1" and importlib.util.find_spec("lmcache") is not None:
        logger.info(
            "%s is provided by the installed lmcache package; set KVSTRATA_TAKEOVER=1, or "
            '"kv_connector_module_path": "%s", to use kvstrata',
            NAME,
            MODULE,
        )
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry = KVConnectorFactory._registry
    if getattr(registry.get(NAME), "kvstrata", False):
        return

    def load() -> type:
        from kvstrata.connectors.vllm.connector import LMCacheConnectorV1

        return LMCacheConnectorV1

    load.kvstrata = True  # type: ignore[attr-defined]
    registry[NAME] = load
    logger.info("%s is provided by kvstrata", NAME)
