"""Where the lines of our library go in a process of vLLM, which configures only its own logger."""

from __future__ import annotations

import logging


def log_like_vllm() -> None:
    """Let our library's log lines go where vLLM's go. If vLLM's logger has no handler, both leave that to the root."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvstrata")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
