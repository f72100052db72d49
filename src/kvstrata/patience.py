"""One factor for every limit after which a live process counts as silent, dead or too slow; only tests raise it.

On a busy machine a live process may not run for seconds.  Tests of anything but these limits must not fail then, so
they set KVSTRATA_PATIENCE=20 beside KVSTRATA_TESTING=1.  Tests of silence leave it at 1.

Limits are multiplied where they are used, or where a setting gets its default (config/load.py).  Intervals, pauses
between attempts, and expiry times of remembered state are not limits.  Native code reads the same variables
(`base/patience.h`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvstrata.errors import ConfigError
from kvstrata.failpoints import TESTING_VARIABLE, is_testing

VARIABLE = "KVSTRATA_PATIENCE"
MAX_FACTOR = 1_000


def patience(limit: float) -> float:
    """A limit, in any unit of time, times the factor of this process's environment as it is now."""
    return limit * factor(os.environ)


def factor(environment: Mapping[str, str]) -> float:
    """The factor in an environment that `check` accepts; 1 outside tests."""
    return float(environment.get(VARIABLE) or 1) if is_testing(environment) else 1.0


def check(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if the variable is not a number from 1 to MAX_FACTOR, or is set outside tests."""
    text = environment.get(VARIABLE, "")
    if not text:
        return
    if not is_testing(environment):
        raise ConfigError(
            f"{VARIABLE}: lengthens the time limits of this process, for tests only; remove it, or also set "
            f"{TESTING_VARIABLE}=1",
            field=VARIABLE,
        )
    try:
        is_one = 1 <= float(text) <= MAX_FACTOR
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"{VARIABLE}: must be a number from 1 to {MAX_FACTOR}, found {text!r:.40}", field=VARIABLE
        )
