"""docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from docs.generate.source import GENERATED, table
from kvstrata.controller.metrics import CONTROLLER_FAMILIES
from kvstrata.gateway.metrics import GATEWAY_FAMILIES
from kvstrata.observability.families import COUNTED, FAMILIES, PATHS, Family
from kvstrata.storage.config import StorePolicy

LABELS = {
    "instance_id": "`instance_id` of the configuration",
    "op": "[operations](protocol.md#operations)",
    "code": "[error codes](protocol.md#errors)",
    "reason": "[reasons of a miss](protocol.md#reasons-of-a-miss); for skipped puts: `Skip` in "
    "`src/kvstrata/tiers/puts.py`, or the adapter's own word",
    "outcome": "[outcomes of reserve](protocol.md#operations); for an adapter: `stored`, `absent` and so "
    "on, with `:reason` where there is one",
    "tier": "`l1`, or `l2` for what was loaded first",
    "tenant": "a tenant that the settings or the tenants file name",
    "adapter": "type and index in `l2_adapters`, like `fs-0`",
    "operation": "`exists`, `put`, `load`, `delete`",
    "state": "states of an entry in L1: `reserved`, `ready`, `unverified`, `quarantined`",
    "cause": "causes of an eviction: `policy`, `window`, `quota`, `watermark`",
    "event": "numbers that the adapter counts (`numbers` in the status), of bytes without `_bytes`",
    "answer": "`asked`, `recalled_present`, `recalled_absent`",
    "node": "a NUMA node",
}


def _family_rows(families: Mapping[str, Family]) -> list[list[str]]:
    return [
        [
            f"`{_sample(name, family)}`",
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            family.meaning,
        ]
        for name, family in families.items()
    ]


def _sample(name: str, family: Family) -> str:
    return name + ("_total" if family.kind == "counter" else "")


def _status_rows() -> list[list[str]]:
    """A row for each number of the status document that is a metric."""
    return [
        [
            f"`{_sample(name, FAMILIES[name])}`",
            FAMILIES[name].kind,
            ", ".join(f"`{label}`" for label in FAMILIES[name].labels),
            f"`{path}`",
            FAMILIES[name].meaning,
        ]
        for path, name in PATHS.items()
    ]


def metrics() -> str:
    """docs/metrics.md."""
    labels = dict.fromkeys(label for family in FAMILIES.values() for label in family.labels)
    return "".join(
        (
            "# Metrics\n\n",
            GENERATED.format(
                "`COUNTED` in `src/kvstrata/observability/families.py` and `STATUS_NUMBERS` in `numbers.py` beside it"
            ),
            "\n`/metrics` on the admin port, in Prometheus' text format. A page is at most 0.25 s old. Counters start "
            "at 0 with the server, durations are in seconds, ratios between 0 and 1. No label names requests or "
            "keys, and every label has a closed set of values.\n\n"
            "## Counted as it happens\n\n",
            table(["metric", "type", "labels", "meaning"], _family_rows(COUNTED)),
            "\n### Labels\n\n",
            table(["label", "values"], [[f"`{label}`", LABELS[label]] for label in labels]),
            "\n## Numbers of the status document\n\nThe same numbers that `kvstrata ctl status --all` shows at their "
            "paths. ADAPTER is the label `adapter`, WORD the other label. Numbers of an adapter are there while the "
            "server has it.\n\n",
            table(["metric", "type", "labels", "path", "meaning"], _status_rows()),
            "\n## Of the controller\n\n`/metrics` on its HTTP port. `instance` is the name of an instance, at most "
            "1,000 of them.\n\n",
            table(["metric", "type", "labels", "meaning"], _family_rows(CONTROLLER_FAMILIES)),
            "\n## Of the gateway\n\n`/metrics` on its port. Tenants and engines are those of the settings, models "
            "those of the engines; a request that had none of them has an empty word, and beyond 4,096 combinations "
            "of the three all are `other`.\n\n",
            table(["metric", "type", "labels", "meaning"], _family_rows(GATEWAY_FAMILIES)),
            f"\nPolicies of an adapter (`l2_store.adapters.ADAPTER.policy`): {', '.join(map(str, StorePolicy))}.\n",
        )
    )
