"""The compiled modules, each with its stub for type checkers beside it. There is no fallback in Python.

Importing this package raises ImportError when no module was built for the running Python; the message names the
command that builds the modules.
"""

import sysconfig
from pathlib import Path

_suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))

if not any(Path(__file__).parent.glob(f"*{_suffix}")):
    raise ImportError(
        f"kvstrata was not compiled for this Python (no *{_suffix} in {Path(__file__).parent}): "
        "run `make setup` in a clone, or `pip install .` with this Python"
    )
