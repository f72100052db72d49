"""Identifies the weights that an engine computes with: the workers sample them, the scheduler keeps a version.

Weights may change while an engine runs (sleep and reload, weight transfer from a trainer).  vLLM tells its connector
only that caches were reset, which happens for other reasons too.  So whenever weights may have changed, each worker
digests samples of all its parameters and compares them with those of its start:

    start, or a reset ──a request arrives──▶ ASKED ──every worker replied──▶ KNOWN, with a `mark` for the keys
                                               └──a worker cannot sample──▶ KNOWN, never asked again

The mark is empty for the initial weights if the layout identity names them (`identity.weights_are_named`).  The mark of
other weights depends on these weights only, so engines of the same parallel sizes that got the same weights share KV.
If a worker cannot sample its weights, each reset makes a unique mark, and so does the start without named weights.

Tensors are used by their methods only; torch is imported when the first tensor is sampled.

LoRA adapters are named in identities by the weights that the workers have loaded, since the files may have changed.

The scheduler side asks the workers which adapter they have under one of vLLM's numbers (`lora_int_id`); each digests
the adapter in its memory, which vLLM loads first if it is absent:

    unknown ──a request──▶ ASKED ──every worker replied──▶ KNOWN ──a worker has another one in its place──▶ unknown

Loads and stores name the question whose answer made their keys.  A worker that has another adapter by then fails the
load or drops the store, and reports it: vLLM notifies no connector when an adapter is replaced in place.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstrata.connectors.boundary import guarded
from kvstrata.types import canonical_json

logger = logging.getLogger("vllm.kvstrata")

RUNS, RUN_BYTES = 64, 64
"""RUNS runs of RUN_BYTES bytes of each parameter are sampled, evenly spread over its memory; a parameter that is
smaller than all these runs together is read whole."""
ASK_AGAIN_S = 10.0
"""Time after which an answer counts as lost."""
UNNAMED = "unnamed"
"""Replaces the initial digest if the layout identity does not name all weights."""
_numbers = itertools.count(1)
"""Numbers of questions, unique in a process."""


class LoadedWeights:
    """The parameters of the model and the draft model in this process. Not thread-safe."""

    def __init__(self, runner: Any, *, named: bool = True) -> None:
        """`runner` has the method `get_model()`, like vLLM's model runners; this object does not keep it alive.

        `named`: the layout identity names the weights, except those that the model's code loads from other places.
        """
        self._runner = weakref.ref(runner)
        self._named = named and not any(
            getattr(part, "secondary_weights", ()) for model in _models(runner) for part in model.modules()
        )
        digest = self.digest()
        self.initial = digest if self._named else UNNAMED
        """The digest when this object was made, or UNNAMED."""

    def digest(self) -> str:
        """Hex digest of names, shapes, strides, dtypes and samples of all parameters; "" if they cannot be read.

        Persistent buffers count as parameters, because checkpoints fill them too.  Two trainings differ nearly
        everywhere, and even one small step changes some of the samples; a manual change of a few numbers may go
        undetected.  Takes some milliseconds, and waits for the device's queued work.
        """
        runner = self._runner()
        if runner is None:
            return ""
        found: dict[str, Any] = {}
        for number, model in enumerate(_models(runner)):
            for place, part in model.named_modules():
                prefix = f"{'draft.' * number}{place}."
                own = dict(part.named_parameters(recurse=False))
                passing = part._non_persistent_buffers_set
                own |= {name: each for name, each in part.named_buffers(recurse=False) if name not in passing}
                packed = _product(part, own.get("weight"))
                if packed is not None:
                    own["weight"] = packed
                elif not self._named and _is_packed(own.get("weight")):
                    return ""
                found |= {prefix + name: each for name, each in own.items()}
        return digest_of(sorted(found.items()))


def _models(runner: Any) -> list[Any]:
    """The model of vLLM's model runner, and its draft model if there is one."""
    draft = getattr(runner, "get_draft_model", lambda: None)()
    return [runner.get_model()] if draft is None else [runner.get_model(), draft]


def _is_packed(weight: Any) -> bool:
    """Whether vLLM has packed this weight for the CPU, and left its parameter empty."""
    return weight is not None and weight.device.type == "cpu" and weight.numel() == 0


def _product(layer: Any, weight: Any) -> Any:
    """The output of a linear layer with a packed weight for a fixed vector; None for other layers.

    The output depends on every number of the weight.
    """
    width = getattr(layer, "input_size_per_partition", 0)
    if not (_is_packed(weight) and width and hasattr(layer, "cpu_linear")):
        return None
    import torch

    vector = torch.sin(torch.arange(1, width + 1, dtype=torch.float32)).to(weight.dtype)
    return layer.cpu_linear(vector.reshape(1, -1), weight, None)


def digest_of(named: Sequence[tuple[str, Any]], facts: Any = None) -> str:
    """Hex digest of `facts` and of named tensors: names, shapes, strides, dtypes, and RUNS samples of each."""
    import torch

    digest = hashlib.sha256(canonical_json(facts))
    samples: dict[Any, list[Any]] = {}
    for name, parameter in named:
        tensor = parameter.detach()
        digest.update(canonical_json([name, str(tensor.dtype), list(tensor.shape), list(tensor.stride())]))
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        memory = tensor.as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)
        size = memory.numel()
        if size > RUNS * RUN_BYTES:
            step = (size - RUN_BYTES) // (RUNS - 1)
            memory = memory.as_strided((RUNS, RUN_BYTES), (step, 1), memory.storage_offset()).reshape(-1)
        samples.setdefault(tensor.device, []).append(memory)
    for device in sorted(samples, key=str):
        digest.update(torch.cat(samples[device]).cpu().numpy().tobytes())
    return digest.hexdigest()


def find_runner() -> Any:
    """The model runner that is calling us, found on the stack; None if no caller on the stack is a model runner.

    vLLM gives a connector no access to its model, but its model runners call `register_kv_caches` themselves.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if callable(getattr(type(owner), "get_model", None)):
            return owner
        frame = frame.f_back
    return None


def loaded_weights(runner: Any, *, named: bool) -> LoadedWeights | None:
    """The weights of vLLM's model runner; None if they cannot be read, which is logged. See `LoadedWeights`."""
    try:
        weights = LoadedWeights(runner, named=named) if runner is not None else None
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        logger.warning("the model's parameters cannot be sampled: %s", error)
        return None
    if weights is None:
        logger.warning("the model's parameters were not found")
    return weights


class WeightsVersion:
    """The version of the engine's weights, from the workers' answers. Belongs to the scheduler's thread."""

    def __init__(
        self, world_size: int, now: Callable[[], float] = time.monotonic, *, named: bool = True
    ) -> None:
        """`named`: the layout identity names the initial weights."""
        self._world_size = world_size
        self._now = now
        self.named = named
        self.number = next(_numbers)
        """Number of the last question; answers to earlier questions do not count."""
        self._told: list[tuple[str, str]] = []
        self._wanted = False
        self._asked_s = math.inf
        self._was_reset = False
        self.can_tell = True
        """Whether every worker could answer so far."""
        self.known = False
        self.mark = ""
        """Name of the weights; "" for those that the layout identity names. Valid while `known`."""

    def may_have_changed(self) -> None:
        """Handle a reset of caches: the weights are unknown until the workers have answered again."""
        self._wanted, self._asked_s = False, math.inf
        self.number = next(_numbers)  # answers on their way are about the earlier weights
        self._was_reset = True
        self.known = False
        if not self.can_tell:
            self._give_up()

    def wanted(self) -> bool:
        """Called when a request needs the weights: returns whether they are known; if not, asks the workers."""
        now = self._now()
        if not self.known and not 0 <= now - self._asked_s <= ASK_AGAIN_S:
            self._ask(now)
        return self.known

    def take_question(self) -> int:
        """The number of the question to ask in this step; 0 for none. Each question is asked only once."""
        wanted, self._wanted = self._wanted, False
        return self.number if wanted else 0

    def heard(self, number: int, initial: str, digest: str) -> bool:
        """Apply one worker's answer: its initial digest (or UNNAMED) and its current one, "" if it cannot compute it.

        Returns whether this answer makes the weights known.
        """
        if number != self.number or self.known:
            return False
        self._told.append((initial, digest))
        if len(self._told) < self._world_size:
            return False
        self.named &= all(initial != UNNAMED for initial, _ in self._told)
        if not all(initial and digest for initial, digest in self._told):
            self.can_tell = False
            self._give_up()
            return True
        self.known = True
        if self.named and all(initial == digest for initial, digest in self._told):
            self.mark = ""
        else:
            self.mark = hashlib.sha256(
                canonical_json(sorted({digest for _, digest in self._told}))
            ).hexdigest()
        return True

    def _ask(self, now: float) -> None:
        self.number = next(_numbers)
        self._told = []
        self._wanted, self._asked_s = True, now

    def _give_up(self) -> None:
        self.known = True
        if self._was_reset or not self.named:
            self.mark = f"reset {time.time_ns()}"


REMEMBERED = 1024
"""Number of adapters that each side remembers; beyond it the least recently used is forgotten."""
APPLIED_BY = ("target_modules", "enable_tower_connector_lora")
"""Settings of vLLM's LoRAConfig that decide to which layers an adapter is applied."""


class AdapterUnreadable(Exception):
    """A worker cannot identify its adapter, so its KV must not be shared."""


class Adapters:
    """Content ids of LoRA adapters, from the workers' answers. Belongs to the scheduler's thread."""

    def __init__(self, world_size: int, now: Callable[[], float] = time.monotonic) -> None:
        self._world_size = world_size
        self._now = now
        self._known: OrderedDict[int, tuple[Any, WeightsVersion]] = OrderedDict()
        """`lora_int_id` → the LoRARequest, and the version of its weights."""
        self.replaced: set[int] = set()
        """`lora_int_id` of adapters that were replaced in place since vLLM's own cache was last emptied."""

    def name(self, lora: Any) -> str | None:
        """The adapter's part of a request identity: "" for no adapter, None until the workers have answered.

        `lora` is vLLM's LoRARequest or None.  Raises AdapterUnreadable if a worker cannot read its content.
        """
        if lora is None:
            return ""
        version = self._version(lora)
        if not version.wanted():
            return None
        if not version.can_tell:
            raise AdapterUnreadable(f"{lora.lora_name}: a worker cannot tell its weights")
        return canonical_json([str(lora.lora_name), version.mark]).decode()

    def number(self, lora: Any) -> int:
        """The question whose answer `name` gave; 0 for no adapter."""
        return 0 if lora is None else self._version(lora).number

    def take_questions(self) -> list[tuple[int, Any]]:
        """(number, LoRARequest) of the questions to ask in this step."""
        return [
            (number, lora) for lora, version in self._known.values() if (number := version.take_question())
        ]

    def heard(self, number: int, digest: str) -> int:
        """Apply a worker's answer; "" if it cannot read the adapter, or has another one in its place now.

        Returns the `lora_int_id` of an adapter that was replaced, else 0.
        """
        for lora_id, (_, version) in self._known.items():
            if version.number != number:
                continue
            if not version.known:
                version.heard(number, UNNAMED, digest)
            elif version.can_tell and not digest:
                del self._known[lora_id]
                self.replaced.add(lora_id)
                return lora_id
            break
        return 0

    def _version(self, lora: Any) -> WeightsVersion:
        lora_id = int(lora.lora_int_id)
        known, version = self._known.get(lora_id, (None, None))
        if version is None or _named(known) != _named(lora):
            version = WeightsVersion(self._world_size, self._now, named=False)
        self._known[lora_id] = lora, version
        self._known.move_to_end(lora_id)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return version


def _named(lora: Any) -> tuple[str, str]:
    return str(lora.lora_name), str(lora.lora_path)


class LoadedAdapters:
    """The LoRA adapters in the memory of this worker. Not thread-safe."""

    def __init__(self, runner: Any) -> None:
        """`runner` is vLLM's model runner; this object keeps neither it nor its adapters alive."""
        self._runner = weakref.ref(runner)
        self._told: OrderedDict[int, tuple[Any, weakref.ref[Any], str]] = OrderedDict()
        """Question → the LoRARequest, the adapter that answered it, and its digest."""

    @guarded("")
    def digest(self, number: int, lora: Any) -> str:
        """Hex digest of an adapter's weights, the answer to the question `number`; "" if they cannot be read.

        vLLM loads the adapter now if it has not yet, just as for the first request that it schedules.
        """
        adapter = self._loaded(lora)
        digest = self._digest(adapter)
        self._told[number] = lora, weakref.ref(adapter), digest
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        return digest

    @guarded(False)
    def still(self, number: int) -> bool:
        """Whether this worker still has the adapter that it reported for the question `number`, or an equal one."""
        if number not in self._told:
            return False
        lora, told, digest = self._told[number]
        adapter = self._loaded(lora)
        if adapter is not told():
            if self._digest(adapter) != digest:
                return False
            self._told[number] = lora, weakref.ref(adapter), digest
        self._told.move_to_end(number)
        return True

    def _loaded(self, lora: Any) -> Any:
        runner = self._runner()
        assert runner is not None
        loaded = runner.lora_manager._adapter_manager
        if loaded.get_adapter(lora.lora_int_id) is None:
            runner.add_lora(lora)
        return loaded.get_adapter(lora.lora_int_id)

    def _digest(self, adapter: Any) -> str:
        runner = self._runner()
        assert runner is not None
        config = runner.lora_manager.lora_config
        applied = [(name, getattr(config, name, None)) for name in APPLIED_BY]
        parts = [*_parts("settings", applied), *_parts("lora", adapter.loras)]
        parts += _parts("saved", getattr(adapter, "modules_to_save", None))
        tensors = [(name, part) for name, part in parts if hasattr(part, "as_strided")]
        facts = [[name, str(part)] for name, part in parts if not hasattr(part, "as_strided")]
        return digest_of(tensors, facts)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in a value, each with its path, in a fixed order."""
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from _parts(f"{name}.{at}", each)
    elif hasattr(value, "__dict__") and not hasattr(value, "as_strided"):
        yield from _parts(name, vars(value))
    else:
        yield name, value
