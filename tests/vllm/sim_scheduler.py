"""vLLM's own scheduler and block pool without a model, run in vLLM's Python: what it does with a load, step by step.

Reads a JSON object from stdin and writes one to stdout.  In: the folder of a model, sizes, and for each request its
name, the step before which it arrives, its prompt, its answer, and perhaps the step before which it is aborted.  Out:
for each request the steps in which its tokens came, its cached tokens and preemptions; and the KV events of each step.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


def make_scheduler(load: dict[str, Any]) -> Scheduler:
    """A scheduler for one group of full attention, with as many usable blocks as the load says."""
    config = EngineArgs(
        model=load["model"],
        skip_tokenizer_init=True,
        block_size=load["block_tokens"],
        max_model_len=load["max_model_tokens"],
        max_num_seqs=load["max_num_seqs"],
        max_num_batched_tokens=load["max_num_batched_tokens"],
        enable_prefix_caching=True,
        async_scheduling=False,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ).create_engine_config()
    spec = FullAttentionSpec(
        block_size=load["block_tokens"], num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    blocks = load["kv_blocks"] + 1  # one is vLLM's null block
    config.cache_config.num_gpu_blocks = blocks
    cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )
    return Scheduler(
        config, cache, StructuredOutputManager(config), block_size=load["block_tokens"], log_stats=True
    )


def main() -> None:
    load = json.load(sys.stdin)
    scheduler = make_scheduler(load)
    published: list[list[Any]] = []
    scheduler.kv_event_publisher.publish = lambda batch: published[-1].extend(batch.events)
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(load["block_tokens"], hash_fn)
    waiting = list(load["requests"])
    requests: dict[str, Request] = {}
    answers = {each["name"]: each["answer"] for each in waiting}
    steps: dict[str, list[int]] = {name: [] for name in answers}
    step = 0
    while waiting or any(not each.is_finished() for each in requests.values()):
        published.append([])
        for each in load["requests"]:
            if each["arrives"] == step:
                params = SamplingParams(max_tokens=len(each["answer"]), ignore_eos=True)
                params.update_from_generation_config({}, None)
                request = Request(each["name"], each["prompt"], params, None, block_hasher=hasher)
                requests[each["name"]] = request
                scheduler.add_request(request)
                waiting.remove(each)
        for each in load["requests"]:
            if (
                each["leaves"] == step
                and each["name"] in requests
                and not requests[each["name"]].is_finished()
            ):
                scheduler.finish_requests(each["name"], RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = requests[name]
            whole = request.num_computed_tokens == request.num_tokens
            sampled.append([answers[name][request.num_output_tokens]] if whole else [])
            if whole:
                steps[name].append(step)
        order = {name: number for number, name in enumerate(names)}
        scheduler.update_from_output(output, ModelRunnerOutput(names, order, sampled))
        step += 1
    told = {
        name: {
            "steps": steps[name],
            "preemptions": request.num_preemptions,
            "aborted": request.status == RequestStatus.FINISHED_ABORTED,
        }
        for name, request in requests.items()
    }
    events = [[plain(event) for event in batch] for batch in published]
    json.dump({"requests": told, "events": events}, sys.stdout)


def plain(event: Any) -> dict[str, Any]:
    import msgspec

    return msgspec.to_builtins(event)


if __name__ == "__main__":
    main()
