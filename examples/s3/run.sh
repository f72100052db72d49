#!/bin/sh
# Two engines that share a bucket. Usage: run.sh MODEL [ARGUMENT OF VLLM SERVE ...]
# Needs pip install '.[object_store]' in the clone and vLLM on PATH. S3_URL=s3://BUCKET/PREFIX names a bucket of yours, with
# the credentials that AWS's tools find; without it a stand-in is started: pip install 'moto[s3,server]'.
set -eu
shared=$(dirname "$0")/../shared
if [ -n "${S3_URL:-}" ]; then
    adapter='{"type": "object_store", "url": "'"$S3_URL"'"}'
else
    port=${S3_PORT:-5999}
    python3 -m moto.server -H 127.0.0.1 -p "$port" >/dev/null 2>&1 &
    server=$!
    trap 'kill $server 2>/dev/null || true; wait' EXIT
    trap 'exit 130' INT TERM
    "$shared/wait_for_port.sh" "$port" $server
    endpoint=http://127.0.0.1:$port
    python3 -c 'import sys, urllib.request as r; r.urlopen(r.Request(sys.argv[1], method="PUT"), timeout=30)' \
        "$endpoint/kvstrata"
    adapter='{"type": "object_store", "url": "s3://kvstrata/cache", "endpoint": "'"$endpoint"'", "region": "us-east-1",
        "allow_http": true, "access_key_id": "a-stand-in", "secret_access_key": "asks-for-none"}'
fi
"$shared/two_servers.sh" "$adapter" "$@"
