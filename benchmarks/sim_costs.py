"""The costs of an engine from the times of its steps, by least squares.

A step's time is a sum of five terms (engine_model.py), each of which is a cost times a number that the step's schedule
gives.  None may be negative: a cost that would be is left out, and the others are fitted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstrata.errors import ConfigError

FIELDS = ("step_us", "prefill_token_us", "prefill_pair_us", "decode_sequence_us", "decode_context_token_us")
"""Fields of EngineModel, in the order of a sample's numbers."""
LEAST_SAMPLES = 100
LEAST_STEP_US = 1.0
_TINY = 1e-9


class StepSample(NamedTuple):
    """What one step computed, and how long it took."""

    took_us: float
    prefill_tokens: int
    prefill_pairs: int
    """Pairs of a prompt token that was computed and a token that it attends to, itself included."""
    decode_sequences: int
    decode_context_tokens: int
    """Tokens that the decoding sequences attended to."""


def fit_costs(samples: Iterable[StepSample]) -> dict[str, float]:
    """The costs that explain the samples best, as fields of EngineModel.

    Let steps of all kinds be among them: short and long prompts, few and many sequences.  Raises ConfigError for fewer
    than 100 samples or without any prefill or decode.
    """
    kept = list(samples)
    if len(kept) < LEAST_SAMPLES:
        raise ConfigError(
            f"samples: {len(kept)} steps are too few for a fit; measure at least {LEAST_SAMPLES}",
            field="samples",
        )
    for name in ("prefill_tokens", "decode_sequences"):
        if not any(getattr(each, name) for each in kept):
            raise ConfigError(
                f"samples: no step has any {name}; measure a load that has both", field="samples"
            )
    rows = [(1.0, *map(float, each[1:])) for each in kept]
    scales = [max(max(row[at] for row in rows), 1.0) for at in range(len(FIELDS))]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    costs = _least_squares(scaled, [each.took_us for each in kept])
    fitted = {name: cost / scale for name, cost, scale in zip(FIELDS, costs, scales, strict=True)}
    return fitted | {"step_us": max(fitted["step_us"], LEAST_STEP_US)}


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients that are not negative and minimise the squared error."""
    size = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    right = [sum(row[i] * value for row, value in zip(rows, values, strict=True)) for i in range(size)]
    used = [at for at in range(size) if matrix[at][at] > _TINY]
    while used:
        found = _solve([[matrix[i][j] for j in used] for i in used], [right[i] for i in used])
        worst = min(range(len(used)), key=found.__getitem__)
        if found[worst] >= 0:
            break
        del used[worst]
    return [found[used.index(at)] if at in used else 0.0 for at in range(size)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve linear equations by Gauss's elimination; a term that the others determine gets 0."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        best = max(range(at, size), key=lambda row: abs(rows[row][at]))
        rows[at], rows[best] = rows[best], rows[at]
        if abs(rows[at][at]) < _TINY:
            rows[at] = [float(column == at) for column in range(size)] + [0.0]
        for row in range(size):
            if row != at:
                share = rows[row][at] / rows[at][at]
                rows[row] = [a - share * b for a, b in zip(rows[row], rows[at], strict=True)]
    return [rows[at][size] / rows[at][at] for at in range(size)]
