"""Applies changes of the controller's live stream in plain Python: the twin of controller/dashboard/model.js."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def apply(shown: Fields, change: Fields) -> Fields:
    """Return a reader's state after a change of `shown`, its state before ({} at first). Raises ValueError."""
    if change["after"] is None:
        shown = {"cluster": {}, "instances": {}}
    elif change["after"] != shown.get("look"):
        raise ValueError(
            f"after: {change['after']} does not follow {shown.get('look')}; ask for the whole state"
        )
    instances = {name: row for name, row in shown["instances"].items() if name not in change["gone"]}
    for name, fields in change["instances"].items():
        instances[name] = {**instances.get(name, {}), **fields}
    lists: Fields = {name: change[name] for name in ("drained", "removed") if name in change}
    return {
        **shown,
        **lists,
        "look": change["look"],
        "cluster": {**shown["cluster"], **change["cluster"]},
        "instances": instances,
    }
