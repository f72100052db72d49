"""Small models with random weights, made once and kept in the cache folder: nothing is downloaded.

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
from typing import Any

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


FAMILIES = ("gemma3", "gpt-oss", "mistral", "llama4", "deepseek-v3", "qwen3-next")
"""Families of models whose KV is not that of a Llama: `family_model` makes a small one of each."""

DRAFTED = "drafted"
"""A Llama of one layer with an EAGLE draft that imitates it, in the folder `DRAFT` of the model: `drafted_model`."""
DRAFT = "draft"

NEEDS_BFLOAT16 = ("deepseek-v3", "qwen3-next")
"""Families that vLLM computes in bfloat16 only, on a CPU."""


NAMES = (*SIZES, *FAMILIES, DRAFTED)


def dtype_of(name: str) -> str:
    """What to compute a model in: float32 where that is possible.

    Otherwise a hit, which is computed in other shapes than a whole prompt, changes a token now and then; and bfloat16
    takes five times as long where the CPU has neither AVX-512-BF16 nor AMX.
    """
    return "bfloat16" if name in NEEDS_BFLOAT16 else "float32"


def ensure_model(size: str) -> Path:
    """Return the folder of a Llama of this size, of a family's model, or of `DRAFTED`; made on the first call.

    Processes may call this at once.  Raises ValueError for another name, vllm_env.Unavailable without a vLLM
    environment, and provision.StepFailed when torch or transformers fail.
    """
    if size not in NAMES:
        raise ValueError(f"model {size!r}: use one of {', '.join(NAMES)}")
    name = f"llama-{size}" if size in SIZES else size
    folder = vllm_env.root_folder().parent / "models" / f"{name}-{SEED}"
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

    torch.manual_seed(SEED)
    if size in FAMILIES:
        family_model(size).to(torch.bfloat16).save_pretrained(folder)
        return
    if size == DRAFTED:
        drafted_model(folder)
        return
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
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    json.loads((folder / "config.json").read_text())


def drafted_model(folder: Path) -> None:
    """Write a Llama of one layer, and an EAGLE draft that proposes what this Llama samples.

    The draft's layer is the model's, and its first projection passes the embedding on and leaves the hidden state out.
    EAGLE has no norm before its layer, so each embedding has the norm that the model's would give it.  At each position
    the draft computes what the model computes one position later, from all tokens but the first: it differs from the
    model by one token of the context, and by one more for each position whose KV is that of another token.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2_048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    embeddings = model.model.embed_tokens.weight.data
    embeddings /= embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    model.save_pretrained(folder)
    parts = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    kept = {
        name: value
        for name, value in parts.items()
        if name.startswith("layers.0.") and "input_layernorm" not in name
    }
    size = config.hidden_size
    kept |= {"embed_tokens.weight": embeddings, "fc.weight": torch.eye(size, 2 * size)}
    draft = folder / DRAFT
    draft.mkdir()
    copies = {name: value.clone().contiguous() for name, value in kept.items()}
    save_file(copies, str(draft / "model.safetensors"), metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["architectures"] = ["EagleLlamaForCausalLM"]
    (draft / "config.json").write_text(json.dumps(described))


def family_model(family: str) -> Any:
    """A small model of a family, with random weights. Needs the vLLM environment."""
    import transformers as hf

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8_192,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "gemma3":
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**common, num_hidden_layers=6, sliding_window=256))
    if family == "gpt-oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return hf.GptOssForCausalLM(
            hf.GptOssConfig(**common, **experts, num_hidden_layers=4, sliding_window=128)
        )
    if family == "mistral":
        return hf.MistralForCausalLM(hf.MistralConfig(**common, num_hidden_layers=4, sliding_window=512))
    if family == "llama4":
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 512}
        return hf.Llama4ForCausalLM(
            hf.Llama4TextConfig(**common, **experts, num_hidden_layers=4, attention_chunk_size=1_024)
        )
    if family == "deepseek-v3":
        latent = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
        experts = {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "n_group": 1,
        }
        return hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **{**common, "num_key_value_heads": 4}, **latent, **experts,
                topk_group=1, qk_nope_head_dim=128, num_hidden_layers=3, first_k_dense_replace=1,
            )
        )  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    }  # fmt: skip
    return hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **common, **experts, **linear, num_hidden_layers=4, shared_expert_intermediate_size=256
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", required=True, choices=NAMES)
    parser.add_argument("--folder", required=True, type=Path)
    arguments = parser.parse_args()
    make_model(arguments.folder, arguments.make)
    return 0


if __name__ == "__main__":
    sys.exit(main())
