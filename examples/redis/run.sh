#!/bin/sh
# Two engines that share a Redis. Usage: run.sh MODEL [ARGUMENT OF VLLM SERVE ...]
# Needs redis-server (Debian, Ubuntu: apt-get install redis-server), vLLM and kvstrata on PATH.
set -eu
shared=$(dirname "$0")/../shared
port=${REDIS_PORT:-6399}
redis-server --port "$port" --bind 127.0.0.1 --save '' --appendonly no \
    --maxmemory "${REDIS_MAXMEMORY:-4gb}" --maxmemory-policy allkeys-lru >/dev/null &
redis=$!
trap 'kill $redis 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM
"$shared/wait_for_port.sh" "$port" $redis
"$shared/two_servers.sh" '{"type": "resp", "host": "127.0.0.1", "port": '"$port"'}' "$@"
