"""The pages of docs/ and the files of configs/ that are generated: `python -m docs.generate` writes them all.

Their contents come from the code: types, bounds and meanings from the settings structs and the tables of metrics.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from docs.generate.adapters import adapters
from docs.generate.configuration import reference as configuration
from docs.generate.dashboard import dashboard
from docs.generate.lmcache import coming_from_lmcache
from docs.generate.monitoring import for_kubernetes
from docs.generate.numbers import metrics
from docs.generate.source import DOCS

PAGES: dict[str, Callable[[], str]] = {
    "../configs/grafana/kvstrata.json": dashboard,
    "../configs/kubernetes/prometheus.yaml": for_kubernetes,
    "adapters.md": adapters,
    "coming-from-lmcache.md": coming_from_lmcache,
    "configuration.md": configuration,
    "metrics.md": metrics,
}
"""By file name below docs/."""


def stale(folder: Path = DOCS) -> Iterator[str]:
    """Names of pages that are not current."""
    for name, make in PAGES.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != make():
            yield name


def main() -> None:
    """Write every page whose text has changed."""
    for name in list(stale()):
        path = (DOCS / name).resolve()
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(PAGES[name](), encoding="utf-8")
        os.replace(fresh, path)
        print(f"wrote {path.relative_to(DOCS.parent)}")
