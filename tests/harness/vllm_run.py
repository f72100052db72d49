"""Real vLLM in a child process, asked by JSON lines: one start (5-30 s) serves many checks.

This file is both sides.  `VllmProcess` is the parent's; run as a script by the Python of the vLLM environment it is the
child: it makes an `LLM` from the options in its first argument and answers until stdin ends.

Operations: `generate`, `submit` and `step` and `abort` (for what must happen at a certain step), `take_calls`
(what the connector's methods would have waited for, in process only), `client` (its counters), `reset_prefix_cache`,
`metrics`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from tests.harness.vllm_fork import Forked, ForkServer

if __package__ in (None, ""):
    # As a script; the parent's PYTHONPATH names src, and nothing of this folder may hide a module.
    sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]

START_S = 240.0
ANSWER_S = 240.0
MODULE = "kvstrata.connectors.vllm"


class VllmFailed(Exception):
    """The child answered with an error or is gone; the message holds the end of its log."""


def transfer(
    extra: dict[str, Any], *, policy: str = "recompute", role: str = "kv_both", bare_name: bool = False
) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`; `bare_name` leaves the module path out."""
    return {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
        **({} if bare_name else {"kv_connector_module_path": MODULE}),
    }


class VllmProcess:
    """One `LLM`. `extra` is the connector's extra config, None for no connector; `options` go to `LLM`.

    `bare_name` leaves the module path out.  `processes` keeps the engine in a process of its own, as in production.
    `state` is a folder for the log and for what vLLM writes.
    """

    fork_server: ClassVar[ForkServer | None] = None
    """Where tests set it, it forks the engines that need no processes of their own: none of them imports vLLM again."""

    def __init__(
        self,
        model: Path,
        state: Path,
        *,
        extra: dict[str, Any] | None,
        bare_name: bool = False,
        processes: bool = False,
        policy: str = "recompute",
        role: str = "kv_both",
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        from tests.harness import vllm_env

        state.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.log = state / "vllm.log"
        llm: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "seed": 0,
            **(options or {}),
        }
        if extra is not None:
            llm["kv_transfer_config"] = transfer(extra, policy=policy, role=role, bare_name=bare_name)
        variables = vllm_env.environment(state)
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes else "0"
        variables.update(environment or {})
        self._buffer = b""
        self.started_s = time.monotonic()
        python = vllm_env.find()
        assert python is not None, "the vLLM environment is gone"
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._pipes = {self._requests, self._answers}
        try:
            with open(self.log, "ab") as log:
                streams = (requests, answers, log.fileno())
                self._process: Forked | subprocess.Popen[bytes]
                if self.fork_server is not None and not processes:
                    self._process = self.fork_server.start(llm, variables, state, streams)
                else:
                    self._process = subprocess.Popen(
                        [str(python), __file__, json.dumps(llm)],
                        stdin=requests,
                        stdout=answers,
                        stderr=log,
                        env=variables,
                        cwd=state,
                        start_new_session=True,
                    )
        except BaseException:
            self._close_pipes(self._requests, self._answers)
            raise
        finally:
            os.close(requests)
            os.close(answers)
        try:
            self.info: dict[str, Any] = self._answer(START_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - self.started_s

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def ask(self, op: str, **arguments: Any) -> Any:
        """The result of an operation. Raises VllmFailed."""
        self.send(op, **arguments)
        return self._answer(ANSWER_S)

    def send(self, op: str, **arguments: Any) -> None:
        """Ask without waiting; `result` gets the answer."""
        line = json.dumps({"op": op, **arguments}).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError:
            raise VllmFailed(self.log_tail()) from None

    def result(self) -> Any:
        """The answer to the oldest `send`."""
        return self._answer(ANSWER_S)

    def generate(self, prompt: list[int], **arguments: Any) -> dict[str, Any]:
        """One request: {"tokens", "cached_tokens", "ttft_s", "wall_s", "finish"}."""
        found: dict[str, Any] = self.ask("generate", prompts=[prompt], **arguments)[0]
        return found

    def log_text(self) -> str:
        """All that vLLM and the connector logged."""
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        """The end of the log."""
        return self.log_text()[-6000:]

    def quit(self) -> None:
        """End in order: the connector is shut down."""
        self._close_pipes(self._requests)
        try:
            self._process.wait(60)
        finally:
            self.close()

    def close(self) -> None:
        """Kill it and everything it started. Idempotent."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        else:
            self._process.kill()
        self._close_pipes(self._requests, self._answers)

    def _close_pipes(self, *pipes: int) -> None:
        for pipe in self._pipes.intersection(pipes):
            os.close(pipe)
        self._pipes.difference_update(pipes)

    def _answer(self, timeout_s: float) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._answers], [], [], left_s)[0]:
                raise VllmFailed(f"no answer for {timeout_s:.0f} s\n{self.log_tail()}")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise VllmFailed(f"exit status {self._process.wait()}\n{self.log_tail()}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise VllmFailed(f"{reply['error']}\n{self.log_tail()}")
        return reply["reply"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- the child --------------------------------------------------------------------------------------------------


class Calls:
    """What each method of the connector was ready to wait for, by wrapping the class before it is instantiated.

    Counted is the time that a call asked its waits and sleeps for, not the time it took: a busy machine makes every
    call slow, but makes none of them wait for somebody.  (A wait without an end shows too: the engine stands still.)
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
        self.took_s: dict[str, list[tuple[float, float]]] = {}
        """Of each call: by the clock, and of its thread's CPU time."""
        self.cpu_s = 0.0
        self._thread = threading.local()

    def wrap(self, connector: type) -> None:
        """Watch every call of these methods, and take the CPU time of the calling thread."""
        for name in self.SCHEDULER + self.WORKER:
            setattr(connector, name, self._watched(name, getattr(connector, name)))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Until the end of the block, waits of threads that are in a watched call are counted."""
        wait, sleep = threading.Condition.wait, time.sleep

        def counted_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            self._count(math.inf if timeout is None else timeout)
            return wait(condition, timeout)

        def counted_sleep(seconds: float) -> None:
            self._count(seconds)
            sleep(seconds)

        # Events, barriers and futures wait by a condition too.
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
                cpu_s = time.thread_time() - cpu
                took_s.append((time.perf_counter() - begun_s, cpu_s))
                waits_s.append(sum(self._thread.waits))
                self._thread.waits = None
                self.cpu_s += cpu_s

        return watched

    def take(self) -> dict[str, Any]:
        """Per method: calls, the longest that one would have waited, the times it took; the CPU seconds of all.

        Then anew.
        """
        taken = {}
        for name, waits_s in self.waits_s.items():
            if waits_s:
                took_s = sorted(self.took_s[name])
                longest_s, cpu_s = took_s[-1]
                times = {
                    "p99_s": took_s[int(0.99 * len(took_s))][0],
                    "longest_s": longest_s,
                    "cpu_of_longest_s": cpu_s,
                }
                taken[name] = {"calls": len(waits_s), "wait_s": max(waits_s), **times}
        for noted in (*self.waits_s.values(), *self.took_s.values()):
            noted.clear()
        cpu_s, self.cpu_s = self.cpu_s, 0.0
        return {"methods": taken, "cpu_s": cpu_s}


class Engine:
    """The child's `LLM` and its operations."""

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
        self.published: list[dict[str, Any]] = []
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            self._listen()

    def _listen(self) -> None:
        """Record what the scheduler publishes, and whom it preempts."""
        from dataclasses import asdict, is_dataclass

        import msgspec

        scheduler = self.scheduler()

        def publish(batch: Any) -> None:
            for event in batch.events:
                record = asdict(event) if is_dataclass(event) else msgspec.structs.asdict(event)
                kept = {k: record.get(k) for k in ("medium", "token_ids", "block_size")}
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
        """Hand a request to the engine; its id."""
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
        """Step the engine at most n times; what finished."""
        finished = []
        while n > 0 and self.core.has_unfinished_requests():
            n -= 1
            for output in self.core.step():
                # Ids get a suffix inside the engine.
                record = self.live.get(output.request_id)
                if record is None:
                    continue
                now = time.perf_counter()
                tokens = list(output.outputs[0].token_ids) if output.outputs else []
                if tokens and record["ttft_s"] is None:
                    record["ttft_s"] = now - record["begun"]
                if output.finished:
                    times = output.metrics  # with the option disable_log_stats=False
                    del self.live[output.request_id]
                    finished.append(
                        {
                            "request": output.request_id,
                            "tokens": tokens,
                            "cached_tokens": output.num_cached_tokens,
                            "ttft_s": record["ttft_s"],
                            "wall_s": now - record["begun"],
                            "waited_s": times.scheduled_ts - times.queued_ts if times else None,
                            "finish": output.outputs[0].finish_reason if output.outputs else None,
                        }
                    )
        return finished

    def generate(self, prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
        """All prompts at once, in their order."""
        names = [self.submit(prompt, **arguments) for prompt in prompts]
        finished: dict[str, dict[str, Any]] = {}
        while len(finished) < len(names):
            finished.update({done["request"]: done for done in self.step()})
        return [finished[name] for name in names]

    def abort(self, request: str) -> None:
        """Take a request back."""
        self.live.pop(request, None)
        self.core.abort_request([request])

    def idle_steps(self, n: int) -> None:
        """Let connector work be reported that vLLM would only see with its next request."""
        for _ in range(n):
            self.core.step()

    def reset_prefix_cache(self, connector: bool = False) -> bool:
        """Forget vLLM's own prefix cache."""
        return bool(self.core.reset_prefix_cache(False, connector))

    def change_weights(self, factor: float) -> None:
        """Multiply one of the weights that layer 0 makes its keys and values with, in place; in process only."""
        model = self.core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        # On the CPU vLLM packs the weights of linear layers and leaves their parameters empty.
        [parameter] = [each for name, each in model.named_parameters() if "layers.0.input_layernorm" in name]
        assert parameter.numel() > 0
        parameter.data.mul_(factor)

    def scheduler(self) -> Any:
        """The engine's scheduler; in process only."""
        return self.core.engine_core.engine_core.scheduler

    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self.scheduler().kv_cache_manager.block_pool.get_num_free_blocks())

    def preemptions(self) -> int:
        """How often the connector was told of a preempted request since the last question."""
        count, self.preempted = self.preempted, 0
        return count

    def events(self) -> list[dict[str, Any]]:
        """KV events published since the last question."""
        taken, self.published = self.published, []
        return taken

    def make_adapter(self, folder: str, seed: int) -> None:
        """Write a LoRA adapter with random weights for all attention projections."""
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

    def take_calls(self) -> dict[str, Any]:
        """See Calls.take."""
        return self.calls.take()

    def client(self) -> dict[str, Any]:
        """Counters of the scheduler's and the worker's client; in process only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        scheduler = self.core.engine_core.engine_core.scheduler.connector._scheduler
        return {"worker": worker._client.stats(), "scheduler": scheduler._client.stats()}


def main(options: dict[str, Any]) -> None:
    """The child: an `LLM` of these options answers requests."""
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
            # The parent decides what an error means; this process goes on.
            say({"error": f"{type(error).__name__}: {error}"})
    from vllm.distributed.kv_transfer import kv_transfer_state

    del engine.llm, engine.core
    kv_transfer_state.ensure_kv_transfer_shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
