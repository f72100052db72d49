"""Real vLLM on the CPU with a random-weight model and without kvstrata, on which the other tests rely."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

model = LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", seed=0)
prompts = [[(i * 7919 + 13) % 31000 + 5 for i in range(300)] for _ in range(3)]
prompts[1][0] += 1
sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=12)
outputs = model.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.mark.vllm
def test_output_depends_on_the_first_token_of_the_prompt_and_on_nothing_else(
    vllm_python: Path,
    vllm_model_folder: Callable[[str], Path],
    vllm_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """Otherwise a test with this model could not see that the KV of a prefix was wrong."""
    done = subprocess.run(
        [vllm_python, "-c", GENERATE, vllm_model_folder("19m")],
        env={**vllm_environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    first, changed, repeated = json.loads(line.removeprefix("TOKENS "))
    assert first == repeated
    assert first != changed
    assert len(set(first)) > 6, f"a loop hides corruption: {first}"
