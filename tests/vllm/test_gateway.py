"""A real gateway before two real engines that share a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvstrata.gateway.tokens.prompts import CHAT, FEATURES, prompt_in
from kvstrata.gateway.tokens.tokenizer import OwnTokenizer
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.server_process import ServerProcess
from tests.harness.tokenizer_folder import chatml
from tests.harness.vllm_api import VllmApi
from tests.vllm.conftest import API_FLAGS, chunks_in_l1, make_prompt, until

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def flags() -> tuple[str, ...]:
    """An engine's flags; it publishes KV events."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    }
    tools = "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    return *API_FLAGS, "--enable-prefix-caching", "--kv-events-config", json.dumps(events), *tools


def ask(gateway: GatewayProcess, model: Path, prompt: list[int], **more: Any) -> Any:
    """Post a completion of the session `s`; return the open answer."""
    body = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }
    headers = {"Content-Type": "application/json", "X-Session-ID": "s"}
    request = urllib.request.Request(f"{gateway.url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


def tokens_of(gateway: GatewayProcess, model: Path, prompt: list[int]) -> list[int]:
    with ask(gateway, model, prompt) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def chat(url: str, model: Path, messages: list[Any], **more: Any) -> Any:
    body = {
        "model": str(model),
        "messages": messages,
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps({**body, **more}).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"b": {}, "a": {}}}}


def chats() -> list[dict[str, Any]]:
    """Bodies of chats: turns of one, with tools, with what they answered, with parts and options."""
    user, parts = (
        {"role": "user", "content": "Grüße <|im_end|> 12345"},
        [{"type": "text", "text": one} for one in "ab"],
    )
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "x y"}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    thought = {"role": "assistant", "content": "so", "reasoning_content": "because"}
    tools = [user, called, {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"}]
    return [
        {"messages": [{"role": "system", "content": "s"}, user]},
        {"messages": [user, thought, {"role": "user", "content": parts}], "reasoning_effort": "none"},
        {"messages": tools, "tools": [TOOL]},
    ]


def check_tokens(gateway: GatewayProcess, model: Path, engine: VllmApi) -> None:
    """The gateway computes the ids of chats that an engine computes, and the answers to passed ids are the same."""
    until(lambda: gateway.log.read_text().count("tokens_verified") == 2, "the verification of both engines")
    own = status(gateway)["tokens"]
    found = own["models"][str(model)]
    assert set(found["features"]) == set(FEATURES) and found["cut"] and not found["degraded"], (
        gateway.log.read_text()
    )
    assert gateway.log.read_text().count("takes_ids=True") == 2
    tokenizer = OwnTokenizer("m", str(tokenizer_folder_of(gateway)), "path")
    for body in chats():
        prompt = prompt_in(CHAT, json.dumps(body).encode())
        assert prompt is not None
        messages = body.pop("messages")
        answer, straight = (chat(url, model, messages, **body) for url in (gateway.url, engine.url))
        assert answer["choices"] == straight["choices"]
        assert answer["prompt_token_ids"] == list(tokenizer.ids_of(prompt, parted=False) or [])
    after = status(gateway)["tokens"]["prompts"][f"{model}/tokenizer"]
    assert after == own["prompts"].get(f"{model}/tokenizer", 0) + len(chats())


def tokenizer_folder_of(gateway: GatewayProcess) -> str:
    """The tokenizer that a gateway has."""
    return str(gateway.settings["tokens"]["tokenizers"][0]["path"])


def status(gateway: GatewayProcess) -> Any:
    headers = {"Authorization": f"Bearer {gateway.token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{gateway.url}/gateway/status", headers=headers)
    ) as answer:
        return json.load(answer)


def place(api: VllmApi) -> str:
    return api.url.removeprefix("http://")


def metric(api: VllmApi, name: str) -> float:
    lines = [line for line in api.get("/metrics").splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines)


def served(gateway: GatewayProcess, api: VllmApi) -> int:
    """Requests of clients that an engine has answered; the gateway's own, by which it verifies engines, are none."""
    with urllib.request.urlopen(f"{gateway.url}/metrics") as answer:
        page = answer.read().decode()
    lines = [line for line in page.splitlines() if line.startswith("kvstrata_gateway_requests_total{")]
    return sum(int(float(line.split()[-1])) for line in lines if f'engine="{place(api)}"' in line)


def test_a_conversation_keeps_its_engine_and_goes_on_at_another_when_that_is_killed(
    server: ServerProcess, small_model: Path, tmp_path: Path, vllm_python: Path
) -> None:
    extra = server.connector_config()
    words = chatml(tmp_path / "tokenizer", 32_000)
    tokens = {
        "tokenizers": [{"model": str(small_model), "path": str(words)}],
        "deadline_ms": 10_000,
        "pass_ids": True,
    }
    with (
        VllmApi(small_model, tmp_path / "one", extra=extra, flags=flags(), tokenizer=words) as one,
        VllmApi(small_model, tmp_path / "two", extra=extra, flags=flags(), tokenizer=words) as two,
        GatewayProcess(tmp_path / "gateway", [one.url, two.url], policy="ttft", tokens=tokens) as gateway,
    ):
        with urllib.request.urlopen(f"{gateway.url}/v1/models") as answer:
            assert [entry["id"] for entry in json.load(answer)["data"]] == [str(small_model)]
        prompt = make_prompt(801, 1_100)
        before = chunks_in_l1(server)
        cold = tokens_of(gateway, small_model, prompt)
        until(lambda: chunks_in_l1(server) >= before + 4, "storing")
        assert tokens_of(gateway, small_model, prompt) == cold
        until(lambda: served(gateway, one) + served(gateway, two) == 2, "both turns on the page of metrics")
        counts = {api: served(gateway, api) for api in (one, two)}
        assert sorted(counts.values()) == [0, 2], "one engine had both turns"
        [kept] = [api for api, count in counts.items() if count]
        [other] = [api for api, count in counts.items() if not count]

        # Each engine was asked where it publishes, and what the one has is known exactly.
        def heard() -> bool:
            page = status(gateway)["kv_events"]
            known, none = page[place(kept)], page[place(other)]
            # The engine's own cache also has what the gateway verified it with: prompts shorter than a chunk.
            more = known["blocks"] * known["block_tokens"][0] - 1_024
            whole = known["whole"] and none["whole"] and not known["orphans"]
            return bool(whole) and 0 <= more < 1_024

        until(heard, "the blocks of the prompt")
        assert metric(kept, "vllm:prefix_cache_hits_total") > 1_000

        stream = ask(gateway, small_model, prompt, stream=True, max_tokens=2_000, ignore_eos=True)
        assert stream.readline().startswith(b"data: ")
        stream.close()
        until(
            lambda: metric(kept, "vllm:num_requests_running") == 0,
            "the abort of a request whose client has gone",
        )
        assert metric(kept, "vllm:generation_tokens_total") < 1_000

        check_tokens(gateway, small_model, kept)
        kept.kill()

        def loaded() -> bool:  # on a busy machine the server may be silent, and the engine computes
            assert tokens_of(gateway, small_model, prompt) == cold
            return metric(other, "vllm:kvstrata_loaded_chunks_total") >= 4

        until(loaded, "a load at the other engine")
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(gateway, small_model, prompt, max_tokens=-1)
        assert refused.value.code == 400 and b"max_tokens" in refused.value.read()
