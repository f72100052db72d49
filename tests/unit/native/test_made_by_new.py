"""No native class gives an object around nothing by `__new__`, which any debugger, copier or pickle may call."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import kvstrata.native

HEAP_TYPE = 1 << 9
# Uses every attribute of an object that only `__new__` has made, with arguments of a few kinds.
USE = """
import importlib, sys
ARGUMENTS = ((), (0,), (bytes(32),), ([],), (0, 0), (bytes(32), 0), ([], []), (0, 0, 0), (0, 0, 0, 0))
for named in sys.argv[1:]:
    print(named, flush=True)
    module, name = named.rsplit(".", 1)
    kind = getattr(importlib.import_module(module), name)
    try:
        made = kind.__new__(kind)
    except TypeError:
        continue
    for one in dir(kind):
        if one.startswith("__") and one not in ("__len__", "__repr__", "__enter__", "__exit__"):
            continue
        for arguments in ARGUMENTS:
            try:
                found = getattr(made, one)
                found(*arguments)
            except Exception:
                pass
    del made
"""


def test_an_object_that_only_new_has_made_is_refused_or_harmless() -> None:
    named = []
    for info in pkgutil.iter_modules(kvstrata.native.__path__, "kvstrata.native."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            if isinstance(kind, type) and kind.__module__ == info.name and not kind.__flags__ & HEAP_TYPE:
                named.append(f"{info.name}.{name}")
    assert len(named) > 10
    done = subprocess.run(
        [sys.executable, "-c", USE, *named], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout.split()[-1] + done.stderr
