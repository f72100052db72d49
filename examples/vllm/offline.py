"""Offline generation with a cache that outlives the process.

    lmcache-server &
    python offline.py MODEL          # computes the prompt and stores it
    python offline.py MODEL          # another process: the prompt comes from the cache

MODEL is a name or folder that vLLM can load.
"""

from __future__ import annotations

import argparse
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 400


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=5555, help="RPC port of lmcache-server")
    arguments = parser.parse_args()
    llm = LLM(
        model=arguments.model,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheConnectorV1",
            kv_connector_module_path="kvstrata.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"lmcache.mp.port": arguments.port},
        ),
    )
    begun = time.perf_counter()
    (output,) = llm.generate([DOCUMENT], SamplingParams(temperature=0, max_tokens=16))
    seconds = time.perf_counter() - begun
    print(
        f"{len(output.prompt_token_ids)} tokens of prompt, {output.num_cached_tokens} of them from the cache"
    )
    print(f"{seconds:.2f} s: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
