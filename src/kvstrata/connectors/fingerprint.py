"""Digests of a model's files, which distinguish its weights from any others."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvstrata.errors import ConfigError
from kvstrata.types import canonical_json

SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 256
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


def has_weights(path: str | os.PathLike[str]) -> bool:
    """Whether this is a weight file, or a folder with one."""
    root = Path(path)
    return any(each.suffix in WEIGHT_SUFFIXES and each.is_file() for each in (root, *root.glob("*")))


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """Hex digest for the weights below a folder (or of one file): names, sizes, and samples of content.

    It reads 256 samples of 4 KiB, evenly spread, from each weight file (a file of up to 1 MiB whole), and all of every
    `*.json` and `*.py`.  Two trainings of one architecture differ nearly everywhere, so samples tell them apart; a
    change of a few bytes made by hand may not be seen.  A folder without a weight file has a digest too; see
    `has_weights`.  Raises ConfigError if a file cannot be read.
    """
    root = Path(folder)
    try:
        files = [root] if root.is_file() else sorted(p for p in root.glob("*") if p.is_file())
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ConfigError(f"model: {folder} cannot be read: {error}", field="model") from None
    digest = hashlib.sha256()
    for path in files:
        weight = path.suffix in WEIGHT_SUFFIXES
        if not weight and path.suffix not in (".json", ".py"):
            continue
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(canonical_json([path.name if root.is_dir() else "", size]))
                if not weight or size <= SAMPLE_BYTES * SAMPLES_PER_FILE:
                    digest.update(file.read())
                else:
                    for sample in range(SAMPLES_PER_FILE):
                        file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES_PER_FILE - 1))
                        digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise ConfigError(f"model: {path} cannot be read: {error}", field="model") from None
    return digest.hexdigest()
