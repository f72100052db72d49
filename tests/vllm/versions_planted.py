"""Copies of the environment's vLLM with another version number and planted differences: folders to put in front of it.

All files but the edited ones are links, so a copy costs nothing.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.harness import vllm_env


def installed_package() -> Path:
    """The folder of the environment's package `vllm`."""
    python = vllm_env.find()
    assert python is not None, "the vLLM environment is gone"
    where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    done = subprocess.run([str(python), "-P", "-c", where], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def planted(folder: Path, version: str, *edits: tuple[str, str, str]) -> Path:
    """Make a copy below `folder`. An edit: a file of the package, a pattern that must be there, its replacement."""
    package = installed_package()
    number = ("_version.py", r"(__version__ = version = )'[^']*'", rf"\1'{version}'")
    for name, pattern, replacement in (number, *edits):
        _link(package, folder / "vllm", Path(name).parent.parts)
        target = folder / "vllm" / name
        text, found = re.subn(pattern, replacement, target.read_text(), count=1, flags=re.DOTALL)
        assert found, f"{name} has no {pattern!r}"
        target.unlink()
        target.write_text(text)
    # Facts about the classes of models, which are the same and take seconds to find out.
    (folder / "vllm-cache").symlink_to(vllm_env.root_folder() / "vllm-cache")
    return folder


def _link(source: Path, target: Path, below: tuple[str, ...]) -> None:
    """Make `target` a folder of links to the entries of `source`, and likewise for the folders of the path `below`."""
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
    if below:
        _link(source / below[0], target / below[0], below[1:])
