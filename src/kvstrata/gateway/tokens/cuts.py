"""Where a text may be cut so that the parts' tokens are those of the whole.

A tokenizer first looks for its added tokens in the raw text, from left to right, and takes the longest where several
begin.  What lies between two of them is tokenised by itself.  So a text may be cut before each occurrence of an added
token that is *certain*: whatever stands around it, it is found there.  That holds for a token T if

1. it is looked for in the raw text (`normalized` is off), anywhere (`single_word` is off), and takes no blanks from
   around it (`lstrip` and `rstrip` are off);
2. no other added token contains T, or ends with a beginning of T, and T itself does not end with a beginning of T:
   then nothing that begins before T's occurrence, or with it, can cover a part of it.  Nothing that takes blanks
   reaches into T, which begins and ends with none;
3. each part begins with T, so that what a tokenizer does at the start of a text only (an added blank) is not done
   to it.

`tests/unit/gateway/test_tokens.py` compares the tokens of parts and wholes for drawn tokenizers and texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken


def certain(tokens: Iterable[AddedToken]) -> list[str]:
    """The texts of added tokens that are found wherever they stand."""
    every = list(tokens)
    raw = [one for one in every if not (one.normalized or one.single_word or one.lstrip or one.rstrip)]
    return [one.content for one in raw if _is_certain(one.content, [each.content for each in every])]


def _is_certain(text: str, others: list[str]) -> bool:
    if not text or text != text.strip():
        return False
    for other in others:
        if other != text and text in other:
            return False
        if any(other.endswith(text[:length]) for length in range(1, len(text))):
            return False
    return True


def parts_of(text: str, cut: str) -> list[str]:
    """The text in parts; each but the first begins with `cut`, which may be empty for no cuts."""
    if not cut:
        return [text]
    first, *rest = text.split(cut)
    return [first, *(cut + part for part in rest)]
