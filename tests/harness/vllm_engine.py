"""The child of `vllm_run.VllmProcess`: an `LLM` that answers requests until stdin ends.

The Python of the vLLM environment runs this file as a script, with the options of the `LLM` as its first argument, or
`forks` does in a process that has imported vLLM.  A request is a JSON line, `{"op": NAME, ...}`: the name of a public
method of `Engine` and its arguments.  `submit`, `step` and `abort` are for events that must happen at a certain step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # This file runs as a script: modules of its folder must not hide modules of vLLM's environment.
    sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]


class Calls:
    """Records how long each method of the connector was ready to wait, and how long its calls took.

    The ready time is the sum of the timeouts that a call passed to its waits and sleeps.  A busy machine makes every
    call slow but does not change this sum.  (A wait without a timeout counts as infinite.)
    """

    SCHEDULER = (
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "take_events",
    )
    WORKER = (
        "handle_preemptions",
        "start_load_kv",
        "wait_for_save",
        "get_finished",
        "build_connector_worker_meta",
    )

    def __init__(self) -> None:
        self.waits_s: dict[str, list[float]] = {}
        self.took_s: dict[str, list[float]] = {}
        self.cpu_s = 0.0
        self._thread = threading.local()

    def wrap(self, connector: type) -> None:
        """Watch the methods of the connector's class; call it before the class is instantiated."""
        for name in self.SCHEDULER + self.WORKER:
            setattr(connector, name, self._watched(name, getattr(connector, name)))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the waits and sleeps of watched calls until the end of the block."""
        wait, sleep = threading.Condition.wait, time.sleep

        def counted_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            self._count(math.inf if timeout is None else timeout)
            return wait(condition, timeout)

        def counted_sleep(seconds: float) -> None:
            self._count(seconds)
            sleep(seconds)

        # Events, barriers and futures wait on a condition too.
        threading.Condition.wait = counted_wait  # type: ignore[method-assign]
        time.sleep = counted_sleep
        try:
            yield
        finally:
            threading.Condition.wait, time.sleep = wait, sleep  # type: ignore[method-assign]

    def _count(self, seconds: float) -> None:
        if (waits := getattr(self._thread, "waits", None)) is not None:
            waits.append(seconds)

    def _watched(self, name: str, method: Any) -> Any:
        waits_s, took_s = self.waits_s.setdefault(name, []), self.took_s.setdefault(name, [])

        def watched(*arguments: Any, **named: Any) -> Any:
            cpu, begun_s = time.thread_time(), time.perf_counter()
            self._thread.waits = []
            try:
                return method(*arguments, **named)
            finally:
                took_s.append(time.perf_counter() - begun_s)
                waits_s.append(sum(self._thread.waits))
                self._thread.waits = None
                self.cpu_s += time.thread_time() - cpu

        return watched

    def take(self) -> dict[str, Any]:
        """Return the CPU seconds of all calls and, for each method, calls, longest ready time and times; then reset."""
        taken: dict[str, dict[str, Any]] = {}
        for name, waits_s in self.waits_s.items():
            if waits_s:
                took_s = sorted(self.took_s[name])
                times = {
                    "p99_s": took_s[int(0.99 * len(took_s))],
                    "p999_s": took_s[int(0.999 * len(took_s))],
                    "longest_s": took_s[-1],
                }
                taken[name] = {"calls": len(waits_s), "wait_s": max(waits_s), **times}
        for noted in (*self.waits_s.values(), *self.took_s.values()):
            noted.clear()
        cpu_s, self.cpu_s = self.cpu_s, 0.0
        return {"methods": taken, "cpu_s": cpu_s}


def ours(connector: Any) -> Any:
    """Return our connector, which may be one of several in vLLM's `MultiConnector`."""
    each = getattr(connector, "sub_connectors", [connector])
    return next(one for one in each if type(one).__name__ == "LMCacheConnectorV1")


class Engine:
    """The child's `LLM`; its public methods are the operations that the parent can ask for."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.plugins import load_general_plugins

        self.calls = Calls()
        self.lifetime = contextlib.ExitStack()
        load_general_plugins()
        if "kv_transfer_config" in options and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            from kvstrata.connectors.vllm import LMCacheConnectorV1

            self.calls.wrap(LMCacheConnectorV1)
            self.lifetime.enter_context(self.calls.watching())
        self.llm = LLM(**options)
        self.core = self.llm.llm_engine
        self.count = 0
        self.live: dict[str, dict[str, Any]] = {}
        self.preempted = 0
        self.drafted: dict[str, int] = {}
        self.published: list[dict[str, Any]] = []
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            self._listen()

    def _listen(self) -> None:
        """Record the KV events that the scheduler publishes, and count its preemptions."""
        from dataclasses import asdict, is_dataclass

        import msgspec

        scheduler = self.scheduler()

        def publish(batch: Any) -> None:
            for event in batch.events:
                record = asdict(event) if is_dataclass(event) else msgspec.structs.asdict(event)
                names = ("medium", "token_ids", "block_size", "extra_keys", "group_idx", "kv_cache_spec_kind")
                kept = {name: record.get(name) for name in names}
                kept |= {"event": type(event).__name__, "blocks": len(record.get("block_hashes") or ())}
                self.published.append(kept)

        scheduler.kv_event_publisher.publish = publish
        original = scheduler._preempt_request

        def preempt(*arguments: Any, **named: Any) -> None:
            self.preempted += 1
            original(*arguments, **named)

        scheduler._preempt_request = preempt

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 16,
        salt: str | None = None,
        lora: list[Any] | None = None,
        transfer: dict[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self.count += 1
        name = f"request-{self.count}"
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            inputs["cache_salt"] = salt
        parameters = SamplingParams(
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=max_tokens,
            prompt_logprobs=logprobs,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        self.live[name] = {"begun": time.perf_counter(), "ttft_s": None}
        self.core.add_request(name, inputs, parameters, lora_request=LoRARequest(*lora) if lora else None)
        return name

    def step(self, n: int = 1) -> list[dict[str, Any]]:
        """Step the engine at most n times; return the requests that finished."""
        finished = []
        while n > 0 and self.core.has_unfinished_requests():
            n -= 1
            for output in self.core.step():
                record = self.live.get(output.request_id)
                if record is None:
                    continue
                now = time.perf_counter()
                tokens = list(output.outputs[0].token_ids) if output.outputs else []
                if tokens and record["ttft_s"] is None:
                    record["ttft_s"] = now - record["begun"]
                if output.finished:
                    times = output.metrics  # None unless the option disable_log_stats is False
                    del self.live[output.request_id]
                    finished.append(
                        {
                            "request": output.request_id,
                            "tokens": tokens,
                            "cached_tokens": output.num_cached_tokens,
                            "ttft_s": record["ttft_s"],
                            "wall_s": now - record["begun"],
                            "waited_s": times.scheduled_ts - times.queued_ts if times else None,
                            "transfer": output.kv_transfer_params,
                        }
                    )
        return finished

    def generate(self, prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
        """Answer all prompts at once; return the results in the order of the prompts."""
        names = [self.submit(prompt, **arguments) for prompt in prompts]
        finished: dict[str, dict[str, Any]] = {}
        while len(finished) < len(names):
            finished.update({done["request"]: done for done in self.step()})
        return [finished[name] for name in names]

    def abort(self, request: str) -> None:
        self.live.pop(request, None)
        self.core.abort_request([request])

    def idle_steps(self, n: int) -> None:
        """Step without requests, so that vLLM sees which copies of the connector have ended since the last request."""
        for _ in range(n):
            self.core.step()

    def reset_prefix_cache(self, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache, with `connector` reset the connector too; False while a block is in use."""
        return bool(self.core.reset_prefix_cache(False, connector))

    def load_adapter_again(self, lora: list[Any]) -> None:
        """Load the files of a LoRA adapter in place of what vLLM has, as its API `/v1/load_lora_adapter` does."""
        from vllm.lora.request import LoRARequest

        assert self.core.add_lora(LoRARequest(*lora, load_inplace=True))

    def change_weights(self, factor: float) -> None:
        """Multiply in place a weight that the keys and values of layer 0 depend on; in process only."""
        model = self.core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        # On the CPU vLLM packs the weights of linear layers elsewhere and leaves their parameters empty.
        [parameter] = [each for name, each in model.named_parameters() if "layers.0.input_layernorm" in name]
        assert parameter.numel() > 0
        parameter.data.mul_(factor)

    def scheduler(self) -> Any:
        """Return the engine's scheduler; in process only."""
        return self.core.engine_core.engine_core.scheduler

    def scheduler_side(self) -> Any:
        """Return our connector's side in the scheduler; in process only."""
        return ours(self.scheduler().connector)._scheduler

    def free_blocks(self) -> int:
        return int(self.scheduler().kv_cache_manager.block_pool.get_num_free_blocks())

    def preemptions(self) -> int:
        """Count the scheduler's preemptions since the last call."""
        count, self.preempted = self.preempted, 0
        return count

    def events(self) -> list[dict[str, Any]]:
        """Return the KV events published since the last call."""
        taken, self.published = self.published, []
        return taken

    def make_adapter(self, folder: str, seed: int) -> None:
        """Write a LoRA adapter with random weights for the query, key and value projections."""
        import torch
        from safetensors.torch import save_file

        config = self.core.model_config.hf_config
        head = config.hidden_size // config.num_attention_heads
        out = {
            "q_proj": config.hidden_size,
            "k_proj": head * config.num_key_value_heads,
            "v_proj": head * config.num_key_value_heads,
        }
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(config.num_hidden_layers):
            for name, width in out.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                for part, shape in (("A", (8, config.hidden_size)), ("B", (width, 8))):
                    random = torch.randn(shape, generator=generator) * 0.3
                    weights[f"{prefix}.lora_{part}.weight"] = random.to(torch.bfloat16)
        path = Path(folder)
        path.mkdir()
        save_file(weights, str(path / "adapter_model.safetensors"))
        described = {
            "peft_type": "LORA",
            "r": 8,
            "lora_alpha": 16,
            "target_modules": list(out),
            "bias": "none",
        }
        (path / "adapter_config.json").write_text(json.dumps(described))

    def metrics(self) -> dict[str, float]:
        """Return the connector's counters as vLLM publishes them; needs the option `disable_log_stats` False."""
        return {
            metric.name.removeprefix("vllm:kvstrata_"): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvstrata_")
        }

    def drafts(self) -> dict[str, int]:
        """Return how many drafts vLLM has made, and how many tokens of them it has accepted, since the last call.

        It needs the option `disable_log_stats` False.
        """
        names = {
            f"vllm:spec_decode_num_{what}": what for what in ("drafts", "draft_tokens", "accepted_tokens")
        }
        now = {
            names[metric.name]: int(metric.value) for metric in self.llm.get_metrics() if metric.name in names
        }
        before, self.drafted = self.drafted, now
        return {name: count - before.get(name, 0) for name, count in now.items()}

    def take_calls(self) -> dict[str, Any]:
        """Return and reset the records of the connector's calls, see `Calls.take`; in process only."""
        return self.calls.take()

    def client(self) -> dict[str, Any]:
        """Return the counters of the scheduler's client and of the worker's, one of each group; in process only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        groups = ours(get_kv_transfer_group())._worker._groups
        others = {
            f"worker of group {number}": group.client.stats() for number, group in enumerate(groups) if number
        }
        return {
            "worker": groups[0].client.stats(),
            **others,
            "scheduler": self.scheduler_side()._client.stats(),
        }

    def stores(self) -> dict[str, Any]:
        """Return the number of stores without an outcome, the chunks by outcome of all groups, and the chunks that each
        group has stored; in process only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        outcomes: dict[str, int] = {}
        counts = [group.client.stats() for group in ours(get_kv_transfer_group())._worker._groups]
        for of_group in counts:
            for name, count in of_group.items():
                if name.startswith("store_") and name.endswith("_chunks") and count:
                    outcome = name.removeprefix("store_").removesuffix("_chunks")
                    outcomes[outcome] = outcomes.get(outcome, 0) + count
        return {
            "in_flight": len(self.scheduler_side().stores._in_flight),
            "outcomes": outcomes,
            "stored": [of_group.get("store_stored_chunks", 0) for of_group in counts],
        }

    def late(self) -> dict[str, bool]:
        """Return whether chunks are stored late now, and whether a drain is under way; in process only."""
        stores = self.scheduler_side().stores
        return {"on": stores._records is not None, "draining": stores._late.draining}

    def connected(self) -> bool:
        """Return whether the clients of the scheduler and of all groups of the worker are attached, and the scheduler
        knows it; in process only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        clients = [group.client for group in ours(get_kv_transfer_group())._worker._groups]
        scheduler = self.scheduler_side()._client
        return bool(scheduler.slices) and all(client.connected for client in (*clients, scheduler))

    def chunk_tokens(self) -> int:
        """Return the size of a chunk; in process only."""
        return int(ours(self.scheduler().connector)._setup.settings.chunk_size)

    def hit_step_tokens(self) -> int:
        """Return the number of tokens of which every hit has a multiple; in process only."""
        return int(self.scheduler_side()._tails.step_tokens)


def main(options: dict[str, Any]) -> None:
    """Make an `LLM` of these options and answer requests until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to stdout

    def say(value: dict[str, Any]) -> None:
        os.write(answers, json.dumps(value).encode() + b"\n")

    begun = time.perf_counter()
    engine = Engine(options)
    say({"reply": {"pid": os.getpid(), "load_s": time.perf_counter() - begun}})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        op = request.pop("op")
        try:
            say({"reply": getattr(engine, op)(**request)})
        except Exception as error:
            # The parent decides what an error means; this process keeps answering.
            say({"error": f"{type(error).__name__}: {error}"})
    from vllm.distributed.kv_transfer import kv_transfer_state

    del engine.llm, engine.core
    kv_transfer_state.ensure_kv_transfer_shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
