"""Compares the vLLM that this process imports with what the connector needs, and lets it store and load once.

`python -m kvstrata.connectors.vllm.compat.dry_run` prints a `Verdict` as a line of JSON, at first without the
dry run; `contract` starts it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

from kvstrata.connectors.vllm.compat.contract import MARK, Verdict

TOKENS, CHUNKS = 1000, 3
"""Length of the prompts, and the whole chunks in one."""


def store_and_load(folder: Path, *, v2: bool) -> list[str]:
    """Let vLLM's scheduler and a model runner serve a new prompt and one that is hit; returns what went wrong."""
    from kvstrata.connectors import boundary
    from kvstrata.connectors.vllm import build
    from kvstrata.connectors.vllm.compat.dry_engine import Client, DryEngine, model_folder, vllm_config

    vars(build)["CacheClient"] = Client
    runner = f"with vLLM's {'V2' if v2 else 'V1'} model runner,"
    before = boundary.errors.total
    Client.hits = 0
    engine = DryEngine(vllm_config(model_folder(folder)), v2=v2)
    engine.add(TOKENS)
    stores = [store for step in engine.run() for store in step.get("stores", ())]
    Client.hits = 100
    engine.add(TOKENS, first=2 * TOKENS)
    steps = engine.run()
    loads = [load for step in steps for load in step.get("loads", ())]
    computed = sum(sum(step.get("scheduled", {}).values()) for step in steps)
    wrong = []
    if (stored := sum(chunks for _, chunks, _ in stores)) != CHUNKS:
        wrong.append(f"{runner} {stored} of {CHUNKS} chunks were stored")
    if (loaded := sum(chunks for _, chunks, _, _ in loads)) != CHUNKS:
        wrong.append(f"{runner} {loaded} of {CHUNKS} chunks were loaded")
    elif computed >= TOKENS:
        wrong.append(f"{runner} {computed} tokens of a prompt of {TOKENS} were computed though it was loaded")
    if boundary.errors.total != before:
        wrong.append(f"{runner} {boundary.errors.total - before} calls failed inside the connector")
    wrong += [
        f"{runner} {count} {what} are held at the end" for what, count in engine.left().items() if count
    ]
    # Both are looked for by name alone while vLLM serves, and nothing fails without them.
    if engine.connector._prefix_cache() is None:
        wrong.append("the scheduler's table of cached blocks is not found")
    return wrong


def events() -> list[str]:
    """Make the KV events that the connector publishes; returns what went wrong."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvstrata.connectors.vllm.groups import whole_group
    from kvstrata.connectors.vllm.kv_events import EventMaker
    from kvstrata.connectors.vllm.own_cache import Told

    request = SimpleNamespace(lora_request=None, mm_features=[], cache_salt="salt", prompt_embeds=None)
    try:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
        groups = [whole_group(16, 256), whole_group(16, 256, 1)]
        for make in (EventMaker(groups[:1], [spec]), EventMaker(groups, [spec, spec])):
            make.stored([1], b"", [b"key"], request, 0)
            make.removed([b"key"])
            make.again(Told([b"hash"], None, [1], [None], None), 1)
    except (TypeError, ValueError, AttributeError) as error:
        return [f"KV events cannot be made: {error}"]
    return []


def main() -> None:
    """Print the verdict on names and signatures, and then that on everything."""
    from kvstrata.connectors.vllm.compat.names import compare

    names, signatures, differs = compare()
    _print(Verdict(names, signatures, differs))
    differs += events()
    for v2 in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            differs += store_and_load(Path(folder), v2=v2)
    _print(Verdict(names, signatures, list(dict.fromkeys(differs))))


def _print(verdict: Verdict) -> None:
    print(MARK + json.dumps(verdict._asdict()), flush=True)


if __name__ == "__main__":
    main()
