#!/bin/sh
# LMCACHE_CHUNK_SIZE=1024 was tried
export LMCACHE_MAX_LOCAL_CPU_SIZE=9
LMCACHE_CHUNK_SIZE=256 LMCACHE_EXTRA_CONFIG='{"save_only_first_rank": true}' exec vllm serve model
