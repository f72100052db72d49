"""Whether a version of vLLM that nobody has tested may start with this connector.

Versions in TESTED start at once.  Before any other version serves, a process of its own compares names and signatures
and makes one store and one load (`dry_run`).  If nothing differs, the engine starts, and the log says what was checked;
otherwise it is refused with the differences.  The processes of an engine inherit the result from the first.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.errors import ConfigError

TESTED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The versions of `make test-versions`."""
MARK = "kvstrata-verdict "
INHERITED = "_KVSTRATA_VLLM_PASSED"
"""Environment variable with the version that has passed, for the other processes of an engine."""
PATIENCE_S = 900.0

logger = logging.getLogger("vllm.kvstrata")


class Verdict(NamedTuple):
    """Of one version of vLLM: how many names and signatures were compared, and what differs."""

    names: int = 0
    signatures: int = 0
    differs: Sequence[str] = ()


def is_tested(version: str) -> bool:
    """Whether a version, which may name a build (`0.32.0+cpu`), is among TESTED."""
    return version.partition("+")[0] in TESTED


def check_vllm(version: str) -> None:
    """Check the running vLLM, of this version, unless it is known. Raises ConfigError with what differs."""
    if is_tested(version) or os.environ.get(INHERITED) == version:
        return
    found = _ask(version)
    untested = (
        f"vLLM {version} is not among the versions that this connector is tested with ({', '.join(TESTED)})"
    )
    if found.differs:
        raise ConfigError(
            f"vllm: {untested}, and it differs from them: {'; '.join(found.differs)}; use one of these versions, or a "
            "newer kvstrata",
            field="vllm",
        )
    os.environ[INHERITED] = version
    logger.warning(
        "%s. Checked: %d names, %d signatures, and in a dry run with each model runner a store and a load of 3 chunks; "
        "nothing differs",
        untested,
        found.names,
        found.signatures,
    )


def _ask(version: str) -> Verdict:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HF_HUB_OFFLINE": "1",
        INHERITED: version,  # the dry run's own engine needs no check
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvstrata.connectors.vllm.compat.dry_run"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        return Verdict(differs=[f"a dry run did not end within {PATIENCE_S:.0f} s"])
    said = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    found = Verdict(**json.loads(said[-1])) if said else Verdict()
    if done.returncode == 0:
        return found
    logger.error("the dry run of vLLM %s failed:\n%s", version, done.stderr[-4000:])
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return found._replace(differs=[*found.differs, f"a store and a load in a dry run end with {last:.300}"])
