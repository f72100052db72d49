#!/bin/sh
# Two engines that share a Mooncake Store. Usage: run.sh MODEL [ARGUMENT OF VLLM SERVE ...]
# Needs vLLM on PATH and, in the clone, pip install '.[mooncake]' (Debian: apt-get install libibverbs1 libcurl4 libnuma1).
# Ports: three from MASTER_PORT (50051) on.
set -eu
shared=$(dirname "$0")/../shared
port=${MASTER_PORT:-50051}
mooncake_master --rpc_address=127.0.0.1 --rpc_port="$port" --metrics_port=$((port + 1)) \
    --enable_http_metadata_server=true --http_metadata_server_host=127.0.0.1 \
    --http_metadata_server_port=$((port + 2)) >/dev/null 2>&1 &
master=$!
trap 'kill $master 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM
"$shared/wait_for_port.sh" "$port" $master
"$shared/wait_for_port.sh" $((port + 2)) $master
"$shared/two_servers.sh" '{
    "type": "mooncake_store", "local_hostname": "127.0.0.1", "protocol": "tcp",
    "metadata_server": "http://127.0.0.1:'$((port + 2))'/metadata", "master_server_addr": "127.0.0.1:'"$port"'",
    "global_segment_size": "'"${SEGMENT_BYTES:-2147483648}"'"}' "$@"
