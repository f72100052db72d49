"""The part of `versions_run` about what tells requests apart: tenants, salts, LoRA adapters, prompt embeddings."""

from __future__ import annotations

import json
import re
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


def check_a_tenant_in_the_body_of_a_request_reaches_the_connector(folder: Path) -> None:
    example = re.search(r"^  -d '(\{.*\})'$", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE)
    assert example is not None, "docs/deploy.md has no request with a tenant"
    body: dict[str, Any] = json.loads(example[1])
    prompt = body.pop("prompt")
    for kind, more in (
        (CompletionRequest, {"prompt": prompt}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": prompt}]}),
        (ResponsesRequest, {"input": prompt}),
    ):
        asked: Any = kind.model_validate_json(json.dumps(body | more))
        sampling: SamplingParams = asked.to_sampling_params(16, {})
        request = Request("r", [1, 2, 3], sampling, None)
        assert request.kv_transfer_params == {"kvstrata.tenant": "blue"}, kind


def check_the_trace_of_a_request_reaches_the_connector(folder: Path) -> None:
    named = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=1), None, trace_headers=named)
    assert Tracked(request).traceparent == named["traceparent"]


def check_tenants_salts_and_adapters_share_no_chunk_and_no_block_of_vllms_own_cache(folder: Path) -> None:
    """Equal prompts, one after another."""
    one, other = (_adapter(folder / name, name) for name in ("one", "other"))
    blue = {"params": {"kvstrata.tenant": "blue"}}
    Client.hits = 0
    engine = DryEngine(vllm_config(folder, extra={"kvstrata.request_tenants": ["blue", "green"]}))
    reasons: list[str] = []
    skip = engine.side._lookups.skip

    def noted(tracked: Tracked, reason: str) -> None:
        reasons.append(reason)
        skip(tracked, reason)

    engine.side._lookups.skip = noted  # type: ignore[method-assign]

    def asked(fields: dict[str, Any]) -> tuple[int, set[tuple[str, ...]]]:
        """The tokens that vLLM's own cache had, and the identities of what was stored."""
        engine.plans.clear()
        reasons.clear()
        engine.add(TOKENS, first=10_000, max_tokens=1, **fields)
        steps = engine.run(at_most=20_000)  # an adapter is read meanwhile
        computed = sum(sum(step.get("scheduled", {}).values()) for step in steps)
        stored = {
            (store.identity.adapter, store.identity.tenant, store.identity.salt)
            for plan in engine.plans
            for store in plan.stores
        }
        return TOKENS - computed, stored

    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({}, ("", "", "")),
        (blue, ("", "blue", "")),
        ({"params": {"kvstrata.tenant": "green"}}, ("", "green", "")),
        (blue | {"cache_salt": "pepper"}, ("", "blue", "pepper")),
        ({"cache_salt": "pepper"}, ("", "", "pepper")),
        ({"cache_salt": "sugar"}, ("", "", "sugar")),
    ]
    for fields, identity in cases:
        assert asked(fields) == (0, {identity}) and not reasons
        assert asked(fields)[0] == 512, "vLLM's own cache has it for an equal request"
    adapters = []
    for number, (name, path) in enumerate((("one", one), ("other", other)), start=1):
        cached, [(adapter, tenant, _)] = asked({"lora_request": LoRARequest(name, number, str(path))})
        assert (cached, tenant) == (0, "")
        adapters.append(adapter)
    assert all(adapters) and adapters[0] != adapters[1]
    nobody = {"params": {"kvstrata.tenant": "red"}}
    for fields, reason in (
        *((nobody, "tenant_refused"),) * 2,
        *(({"prompt_embeds": embeds(TOKENS, 8)}, "prompt_embeds") for embeds in (torch.ones, torch.zeros)),
    ):
        assert asked(fields) == (0, set()) and reasons == [reason]


def _adapter(folder: Path, content: str) -> Path:
    """A folder that looks like a LoRA adapter."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content.encode() * 100)
    return folder
