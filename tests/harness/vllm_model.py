"""Small Llama models with random weights, made once and kept in the cache folder: nothing is downloaded.

vLLM's dummy loader is no substitute: a model with its weights repeats two tokens, which hides corrupted KV. With the
weights made here, overwriting stored KV changes every later output token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.harness import vllm_env
from tests.tools import provision

VOCABULARY = 32_000
SEED = 20_26


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Shape of one model; bf16 KV bytes per token = layers * 2 * kv_heads * (hidden / heads) * 2."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    max_tokens: int


SIZES = {
    "19m": ModelSize(layers=4, hidden=256, heads=8, kv_heads=4, max_tokens=8_192),
    "160m": ModelSize(layers=8, hidden=1_024, heads=16, kv_heads=8, max_tokens=16_384),
}


def ensure_model(size: str) -> Path:
    """Return the folder of model `size` ("19m" or "160m"), made on the first call; processes may call this at once.

    Raises ValueError for another size, vllm_env.Unavailable without a vLLM environment, and provision.StepFailed when
    torch or transformers fail.
    """
    if size not in SIZES:
        raise ValueError(f"model size {size!r}: use one of {', '.join(SIZES)}")
    folder = vllm_env.root_folder().parent / "models" / f"llama-{size}-{SEED}"
    if (folder / "config.json").exists():
        return folder
    python = vllm_env.ensure()
    with provision.exclusive(
        folder.with_suffix(".lock"), f"waiting for another process that makes {folder.name}"
    ):
        if (folder / "config.json").exists():
            return folder
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            done = subprocess.run(
                [python, __file__, "--make", size, "--folder", str(scratch)],
                env=vllm_env.environment(scratch / "state"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise provision.StepFailed(f"the model {size} could not be made:\n{done.stdout}")
            shutil.rmtree(scratch / "state", ignore_errors=True)
            os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def make_model(folder: Path, size: str) -> None:
    """Write configuration and weights to `folder`; this needs the vLLM environment."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_tokens,
        # Wide enough that outputs depend on the whole context; the default gives nearly uniform logits.
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    json.loads((folder / "config.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", required=True, choices=SIZES)
    parser.add_argument("--folder", required=True, type=Path)
    arguments = parser.parse_args()
    make_model(arguments.folder, arguments.make)
    return 0


if __name__ == "__main__":
    sys.exit(main())
