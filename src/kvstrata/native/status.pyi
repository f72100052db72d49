"""The exceptions that native modules raise for errors of the C++ core, and the reasons that the core reports.

All native modules get their exceptions from this one.  An exception's class depends on the error's code and on its
*site*, the group of calls that it comes from:

| site | calls | `os_error` | `bad_argument` | `no_space` | `closed` | other codes |
|---|---|---|---|---|---|---|
| `call` | all others | OSError | ValueError | MemoryError | ValueError | ValueError |
| `items` | with items of copies | ValueError | ValueError | MemoryError | ValueError | ValueError |
| `lanes` | of `lanes` | OSError | ValueError | MemoryError | RuntimeError | ValueError |
| `record` | that read a record's headers | RecordError | RecordError | RecordError | RecordError | RecordError |
| `pool` | of `pool`, `index` | OSError | ValueError | PoolError | PoolError | PoolError |
| `registry` | of `registry` | RegistryError | ValueError | RegistryError | RegistryError | RegistryError |

PoolError and RegistryError have a stable `reason`.
"""

from typing import NamedTuple

class ReasonRow(NamedTuple):
    """A row of ext/core/src/base/reason.h."""

    word: str
    retryable: bool
    """The same request may succeed later; a put that is refused with it is THROTTLED."""
    blames_medium: bool
    """Whether the reason blames the medium, as `policy.reasons.blames_medium` defines it."""
    meaning: str

def reasons() -> list[ReasonRow]:
    """The reasons that the native adapters and the pool report."""
