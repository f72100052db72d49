#!/bin/sh
# Two engines, each with its own cache server, share only a remote tier. The first round asks one engine about each document;
# the second round asks the other engine, which has not computed it.
# Usage: two_servers.sh ADAPTER_JSON MODEL [ARGUMENT OF VLLM SERVE ...]
# Ports, from FIRST_PORT (8000) on: two for the engines, two for the servers' admin ports, two for the servers' RPC.
# The scripts in ../redis, ../mooncake and ../s3 start such a tier and call this script.
set -eu
adapter=${1:?usage: two_servers.sh ADAPTER_JSON MODEL [ARGUMENT OF VLLM SERVE ...]}
model=${2:?usage: two_servers.sh ADAPTER_JSON MODEL [ARGUMENT OF VLLM SERVE ...]}
shift 2

port=${FIRST_PORT:-8000}
work=$(mktemp -d)
pids=
engines=
stop() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    wait
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

wait_for() { # URL PID LOG
    until python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=2)' "$1" 2>/dev/null; do
        kill -0 "$2" 2>/dev/null || { cat "$3" >&2; exit 1; }
        sleep 1
    done
}

for n in 1 2; do
    lmcache-server --l1-size-gb "${L1_GB:-2}" --port "$((port + 3 + n))" --http-port "$((port + 1 + n))" \
        --socket-dir "$work/sockets$n" --l2-adapter "$adapter" >"$work/server$n.log" 2>&1 &
    pids="$pids $!"
    wait_for "http://127.0.0.1:$((port + 1 + n))/healthz" $! "$work/server$n.log"
    vllm serve "$model" --host 127.0.0.1 --port "$((port - 1 + n))" --kv-transfer-config '{
        "kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": "kvstrata.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.port": '"$((port + 3 + n))"',
                                      "kvstrata.socket_dir": "'"$work/sockets$n"'"}}' \
        "$@" >"$work/vllm$n.log" 2>&1 &
    pids="$pids $!"
    engines="$engines $!"
done
n=1
for engine in $engines; do
    wait_for "http://127.0.0.1:$((port - 1 + n))/health" "$engine" "$work/vllm$n.log"
    n=2
done
# The servers put the KV of the first round to the tier after its answers; --pause-s gives them time for that.
kvstrata bench serve long-doc-qa --url "http://127.0.0.1:$port" --url "http://127.0.0.1:$((port + 1))" \
    --cache-server "http://127.0.0.1:$((port + 2))" --cache-server "http://127.0.0.1:$((port + 3))" \
    --documents "${DOCUMENTS:-4}" --document-tokens "${DOCUMENT_TOKENS:-4000}" --pause-s 5 ${BENCH_ARGUMENTS:-}
