"""Tries files of real tokenizers: `python -m benchmarks.tokenizer_fuzz TOKENIZER.json...`.

Each gets ChatML's tokens and template.  Drawn texts must have the same ids in parts as in one piece.  Ends with status
1 if some have not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from benchmarks.gateway_tokens import corpus
from kvstrata.gateway.tokens.tokenizer import Memory, OwnTokenizer
from kvstrata.gateway.tokens.verifying import text_in
from tests.harness.tokenizer_folder import CHATML, SPECIAL, save


def drawn(draw: random.Random, text: str, cut: str) -> str:
    """A text as a template makes it, of pieces of `text` and of odd ones."""
    pieces = []
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(text))
        piece = text_in(draw, cut) if draw.random() < 0.5 else text[at : at + draw.randrange(400)]
        pieces.append(f"{SPECIAL[0]}user\n{piece}{SPECIAL[1]}{draw.choice(['', ' ', chr(10)])}")
    return draw.choice(["", " ", "x"]) + "".join(pieces)


def tried(path: Path, folder: Path, seconds: float, seed: int) -> dict[str, object]:
    """What came of one tokenizer."""
    made, draw, text = Tokenizer.from_file(str(path)), random.Random(seed), corpus()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    own = OwnTokenizer(path.stem, str(save(folder, made, CHATML)), "path")
    texts = different = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        one = drawn(draw, text, own.cut)
        ids = own.encode(one, Memory())
        different += list(ids or []) != own.tokenizer.encode(one, add_special_tokens=False).ids
        texts += 1
    return {
        "tokenizer": str(path),
        "vocabulary": made.get_vocab_size(),
        "texts": texts,
        "different": different,
    }


def main() -> int:
    """Try all; the status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="files of tokenizers (tokenizer.json)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for drawn texts of each (20)")
    parser.add_argument("--seed", type=int, default=2026)
    given = parser.parse_args()
    wrong = False
    for path in given.files:
        with tempfile.TemporaryDirectory() as folder:
            found = tried(path, Path(folder) / "m", given.seconds, given.seed)
        print(json.dumps(found))
        wrong = wrong or bool(found["different"])
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
