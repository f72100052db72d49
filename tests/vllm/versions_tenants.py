"""The part of `versions_run` about what tells requests apart: tenants, salts, LoRA adapters, prompt embeddings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvstrata.connectors.vllm.lookup_table import Tracked
from tests.tools.provision import ROOT
from tests.vllm.versions_engine import Client, DryEngine, vllm_config

TOKENS = 600


def check_api() -> Iterator[dict[str, Any]]:
    """The tenant in a body of vLLM's OpenAI server, as it reaches the Request that the connector is asked about."""
    example = re.search(r"^  -d '(\{.*\})'$", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE)
    assert example is not None, "docs/deploy.md has no request with a tenant"
    body: dict[str, Any] = json.loads(example[1])
    prompt = body.pop("prompt")
    bodies = {
        "/v1/completions": (CompletionRequest, {"prompt": prompt}),
        "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": prompt}]}),
        "/v1/responses": (ResponsesRequest, {"input": prompt}),
    }
    for path, (kind, more) in bodies.items():
        asked: Any = kind.model_validate_json(json.dumps(body | more))
        sampling: SamplingParams = asked.to_sampling_params(16, {})
        request = Request("r", [1, 2, 3], sampling, None)
        yield {"check": "api", "path": path, "params": request.kv_transfer_params}


def check_request_kinds(model: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Equal prompts, one after another: the identity of what is stored, and the tokens in vLLM's own cache."""
    adapters = [_adapter(folder / name, name) for name in ("one", "other")]
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "plain again": {},
        "blue": {"params": {"kvstrata.tenant": "blue"}},
        "blue again": {"params": {"kvstrata.tenant": "blue"}},
        "green": {"params": {"kvstrata.tenant": "green"}},
        "blue, salt": {"params": {"kvstrata.tenant": "blue"}, "cache_salt": "pepper"},
        "salt": {"cache_salt": "pepper"},
        "salt again": {"cache_salt": "pepper"},
        "other salt": {"cache_salt": "sugar"},
        "adapter one": {"lora_request": LoRARequest("one", 1, str(adapters[0]))},
        "adapter other": {"lora_request": LoRARequest("other", 2, str(adapters[1]))},
        "nobody's": {"params": {"kvstrata.tenant": "red"}},
        "nobody's again": {"params": {"kvstrata.tenant": "red"}},
        "embeddings": {"prompt_embeds": torch.ones(TOKENS, 8)},
        "other embeddings": {"prompt_embeds": torch.zeros(TOKENS, 8)},
    }
    Client.hits = 0
    engine = DryEngine(vllm_config(model, extra={"kvstrata.request_tenants": ["blue", "green"]}))
    reasons: list[str] = []
    skip = engine.side._lookups.skip

    def noted(tracked: Tracked, reason: str) -> None:
        reasons.append(reason)
        skip(tracked, reason)

    engine.side._lookups.skip = noted  # type: ignore[method-assign]
    for case, fields in cases.items():
        engine.plans.clear()
        reasons.clear()
        engine.add(TOKENS, first=10_000, max_tokens=1, **fields)
        steps = engine.run(at_most=20_000)  # an adapter is read meanwhile
        computed = sum(sum(step.get("scheduled", {}).values()) for step in steps)
        yield {
            "check": "request kind",
            "case": case,
            "found_by_vllm": TOKENS - computed,
            "stored": [
                [store.identity.adapter, store.identity.tenant, store.identity.salt]
                for plan in engine.plans
                for store in plan.stores
            ],
            "skipped": list(reasons),
        }


def _adapter(folder: Path, content: str) -> Path:
    """A folder that looks like a LoRA adapter."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content.encode() * 100)
    return folder
