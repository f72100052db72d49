"""LoRA adapters in identities: named by what the workers have loaded, since the files may have changed meanwhile.

The scheduler side asks the workers which adapter they have under a number of vLLM's (`lora_int_id`); each digests the
adapter in its memory, which vLLM loads first if it is not there:

    unknown ──a request──▶ ASKED ──every worker told──▶ KNOWN ──a worker has another one in its place──▶ unknown

Loads and stores name the question whose answer made their keys.  A worker that has another adapter by then fails the
load or drops the store, and says so.  It happens when an adapter is replaced in place, which vLLM tells no connector.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from kvstrata.connectors.boundary import guarded
from kvstrata.connectors.vllm.weights import UNNAMED, WeightsVersion, digest_of
from kvstrata.types import canonical_json

REMEMBERED = 1024
"""Adapters that each side remembers; the least recently used is forgotten."""
APPLIED_BY = ("target_modules", "enable_tower_connector_lora")
"""Settings of vLLM's LoRAConfig that decide to which layers an adapter is applied."""


class AdapterUnreadable(Exception):
    """A worker cannot tell which adapter it has, so its KV must not be shared."""


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
        """The adapter's part of a request identity: "" for no adapter, None while the workers have not told.

        `lora` is vLLM's LoRARequest or None.  Raises AdapterUnreadable if a worker cannot tell its content.
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
        """Apply a worker's answer; "" if it cannot tell, or has another adapter in the place of the one it told.

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
        """Whether this worker has the adapter by which it answered the question `number`, or an equal one."""
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
    """The tensors and numbers of which a value consists, each with its place in it, in a fixed order."""
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from _parts(f"{name}.{at}", each)
    elif hasattr(value, "__dict__") and not hasattr(value, "as_strided"):
        yield from _parts(name, vars(value))
    else:
        yield name, value
