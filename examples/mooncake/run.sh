#!/bin/sh
# Two engines that share a Mooncake Store. Usage: run.sh MODEL [ARGUMENT OF VLLM SERVE ...]
# Needs pip install 'kvstrata[mooncake]' (Debian, Ubuntu: apt-get install libibverbs1 libcurl4 libnuma1) and vLLM on PATH.
set -eu
mooncake_master --rpc_address=127.0.0.1 --rpc_port=50051 --metrics_port=9003 --enable_http_metadata_server=true \
    --http_metadata_server_host=127.0.0.1 --http_metadata_server_port=8089 >/dev/null 2>&1 &
master=$!
trap 'kill $master 2>/dev/null || true; wait' EXIT
"$(dirname "$0")/../shared/two_servers.sh" '{
    "type": "mooncake_store", "local_hostname": "127.0.0.1", "metadata_server": "http://127.0.0.1:8089/metadata",
    "master_server_addr": "127.0.0.1:50051", "protocol": "tcp",
    "global_segment_size": "'"${SEGMENT_BYTES:-2147483648}"'"}' "$@"
