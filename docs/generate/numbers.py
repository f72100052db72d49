"""docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from docs.generate.source import GENERATED, table
from kvstrata.controller.metrics import CONTROLLER_FAMILIES
from kvstrata.observability.metrics import FAMILIES, STATUS_NUMBERS, Family, gauge_name
from kvstrata.policy.store import StorePolicy

LABELS = {
    "instance_id": "`instance_id` of the configuration",
    "op": "operations of [wire-codes.md](wire-codes.md#operations)",
    "code": "[error codes](wire-codes.md#error-codes)",
    "reason": "[reasons of a miss](wire-codes.md#reasons-of-a-miss); for skipped puts: "
    "[reasons](wire-codes.md#reasons-of-a-put-to-l2-that-was-skipped), or the adapter's own word",
    "outcome": "[outcomes of reserve](wire-codes.md#outcomes-of-reserve); for an adapter: `stored`, `absent` and so "
    "on, with `:reason` where there is one",
    "tenant": "a tenant of `tenants` whose pool is `own`",
    "adapter": "type and index in `l2_adapters`, like `fs-0`",
    "operation": "`exists`, `put`, `load`, `delete`",
}


def _family_rows(families: Mapping[str, Family]) -> list[list[str]]:
    return [
        [
            f"`{name}{'_total' if family.kind == 'counter' else ''}`",
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            family.meaning,
        ]
        for name, family in families.items()
    ]


def metrics() -> str:
    """docs/metrics.md."""
    counted = _family_rows(FAMILIES)
    labels = dict.fromkeys(label for family in FAMILIES.values() for label in family.labels)
    gauges = [[f"`{gauge_name(path)}`", f"`{path}`", text] for path, text in STATUS_NUMBERS.items()]
    return "".join(
        (
            "# Metrics\n\n",
            GENERATED.format("`FAMILIES` and `STATUS_NUMBERS` in `src/kvstrata/observability/metrics.py`"),
            "\n`/metrics` on the admin port, in Prometheus' text format. Counters start at 0 with the server. "
            "No label names tenants, requests or keys, and every label has a closed set of values.\n\n"
            "## Counted as it happens\n\n",
            table(["metric", "type", "labels", "meaning"], counted),
            "\n### Labels\n\n",
            table(["label", "values"], [[f"`{label}`", LABELS[label]] for label in labels]),
            "\n## Numbers of the status document\n\nGauges without labels, which `kvstrata ctl status --all` shows at "
            "their paths. ADAPTER stands for an adapter's name, WORD for one of several words; characters other than "
            "letters and digits become `_`. Those of an adapter are there while the server has it.\n\n",
            table(["metric", "path", "meaning"], gauges),
            "\n## Of the controller\n\n`/metrics` on its HTTP port. `instance` is the name of an instance, at most "
            "`max_instances` of them.\n\n",
            table(["metric", "type", "labels", "meaning"], _family_rows(CONTROLLER_FAMILIES)),
            f"\nPolicies of an adapter (`l2_store.adapters.ADAPTER.policy`): {', '.join(map(str, StorePolicy))}.\n",
        )
    )
