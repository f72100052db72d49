"""vLLM's own factory finds our connector under each of LMCache's names, with and without a published module path."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvstrata.config.lmcache.interfaces import CONNECTORS
from tests.harness import vllm_env

pytestmark = pytest.mark.vllm

FIND = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins

load_general_plugins()
found = []
for name, module in json.loads(sys.argv[1]):
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
    found.append(KVConnectorFactory.get_connector_class(config).__module__)
print(json.dumps(found))
"""


def test_vllm_finds_our_connector_under_each_of_lmcaches_names(vllm_python: Path, tmp_path: Path) -> None:
    asked = [(name, module) for name, modules in CONNECTORS.items() for module in (None, *modules)]
    ran = subprocess.run(
        [vllm_python, "-c", FIND, json.dumps(asked)],
        env=vllm_env.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == ["kvstrata.connectors.vllm.connector"] * len(asked)
