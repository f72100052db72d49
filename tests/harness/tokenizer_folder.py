"""Small tokenizers with chat templates, made in a moment: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHATML = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role != 'system' %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>' }}{% endif %}
{%- if reasoning_effort %}{{ reasoning_effort }}{% endif %}
{%- endif %}"""
"""A template as many models have it; contents are text."""
PARTED = """{{ bos_token }}{% for message in messages %}[{{ message.role }}]
{%- for part in message.content %}{{ part.text }};{% endfor %}</s>
{%- endfor %}"""
"""A template that takes contents as lists of parts."""
SIM = """{%- if tools %}{{ '<|tools|>' + (tools | tojson(sort_keys=true)) + '<|end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
"""What the simulated engine does with a conversation."""
SPECIAL = ("<|im_start|>", "<|im_end|>")
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other one",
    "def f(self): return None",
    "1234567890",
] * 3


def save(folder: Path, tokenizer: Tokenizer, template: str, **config: str) -> Path:
    """Write a folder like a model's; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def chatml(folder: Path, vocabulary: int = 0) -> Path:
    """A byte-level tokenizer with ChatML; its vocabulary is filled up to so many tokens that no text has."""
    made = byte_level()
    document = json.loads(made.to_str())
    known = document["model"]["vocab"]
    known |= {f"<fill{number}>": number for number in range(made.get_vocab_size(), vocabulary)}
    made = Tokenizer.from_str(json.dumps(document))
    return save(folder, made, CHATML, eos_token="<|im_end|>")


def byte_level(*, head: bool = False, text: Sequence[str] = _CORPUS, vocabulary: int = 400) -> Tokenizer:
    """A byte-level tokenizer trained on `text`, with ChatML's tokens; with `head` it puts one before texts."""
    made = Tokenizer(models.BPE())
    split = Regex(
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(text, trainer)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    if head:
        made.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", made.token_to_id("<|im_start|>"))]
        )
    return made


def spaced() -> Tokenizer:
    """A tokenizer that marks blanks, and puts one before the start of a text only, with added tokens of all kinds."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    made.train_from_iterator([*_CORPUS, "áéíóú ñ <|im_start|>"], trainer)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    made.add_tokens(
        [
            AddedToken("e qu", lstrip=True, rstrip=True),
            AddedToken("over", single_word=True),
            AddedToken("|>\n", normalized=False),
        ]
    )
    return made


def composed() -> Tokenizer:
    """A tokenizer that normalises texts."""
    made = byte_level(head=True)
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("_"), normalizers.Replace("  ", " ")]
    )
    return made


def bytes_only(folder: Path) -> Path:
    """The tokens of the simulated engine, which are bytes."""
    # The alphabet in the order of the bytes that its characters stand for.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab=spelled, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return save(folder, made, SIM)
