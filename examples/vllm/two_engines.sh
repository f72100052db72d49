#!/bin/sh
# Two vLLM API servers on one host that share one cache: neither computes a prefix that the other has computed.
# Usage: two_engines.sh MODEL
set -eu
model=${1:?usage: two_engines.sh MODEL}
transfer='{"kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": "kvstrata.connectors.vllm",
           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

trap 'kill 0' EXIT INT TERM
lmcache-server --l1-size-gb "${L1_GB:-4}" &
vllm serve "$model" --port 8001 --kv-transfer-config "$transfer" &
vllm serve "$model" --port 8002 --kv-transfer-config "$transfer" &
wait
