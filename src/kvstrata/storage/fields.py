"""Reads the fields of one entry of `l2_adapters`, each checked under its path."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvstrata.config.lmcache_names import nearest
from kvstrata.errors import ConfigError
from kvstrata.storage.lanes import Lane

log = logging.getLogger(__name__)

COMMON = (
    "type", "policy", "deadline_ms", "max_stuck_mb", "isolation", "host_kill_ms", "shared", "eviction", "serde",
    "codec", "codec_staging_mb", "codec_workers", "presence_ttl_ms", "negative_ttl_ms",
)  # fmt: skip
"""Fields that every type of adapter has."""


class Fields:
    """Reads the fields of one entry, each checked under its path. `finish` refuses what nobody read."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.path = path
        self._values = dict(values)
        self._known: set[str] = set(COMMON)

    def get(self, name: str) -> Any:
        """The value as it is, None when absent."""
        self._known.add(name)
        return self._values.get(name)

    def rest(self) -> dict[str, Any]:
        """All fields that are not common to every type."""
        return {name: value for name, value in self._values.items() if name not in COMMON}

    def wrong(self, name: str, must: str) -> ConfigError:
        """The error for a field's value."""
        where = f"{self.path}.{name}"
        return ConfigError(f"{where}: {must}, found {self._values.get(name)!r:.80}", field=where)

    def refuse(self, name: str, advice: str) -> None:
        """Raise ConfigError for a field that cannot be honoured."""
        where = f"{self.path}.{name}"
        raise ConfigError(f"{where}: {self._values.get(name)!r:.80} is not supported: {advice}", field=where)

    def noted(self, name: str, why: str) -> None:
        """Accept a field that changes nothing here, and say so once."""
        if self.get(name) is not None:
            log.info("%s.%s: noted, has no effect here: %s", self.path, name, why)

    def text(self, name: str, default: str | None = None) -> str:
        """A non-empty string; required when there is no default."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "must be a non-empty string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def number(
        self, name: str, default: float | None, *, least: float, most: float, whole: bool = False
    ) -> float | None:
        """A number within bounds."""
        value = self.get(name)
        if value is None:
            return default
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise self.wrong(name, f"must be a {'whole ' * whole}number from {least:g} to {most:g}")
        return value

    def choice(self, name: str, choices: list[Any], default: str) -> str:
        """One of some words."""
        value = self.get(name)
        if value is None:
            return default
        words = [str(choice) for choice in choices]
        if value not in words:
            hint = nearest(value, words) if isinstance(value, str) else ""
            raise self.wrong(name, f"must be one of {', '.join(words)}{hint}")
        return str(value)

    def workers(self, name: str) -> dict[Lane, int]:
        """Threads per lane."""
        value = self.get(name)
        if value is None:
            return {}
        words = [str(lane) for lane in Lane]
        if not isinstance(value, Mapping):
            raise self.wrong(name, f"must be an object with some of {', '.join(words)}")
        inner = Fields(value, f"{self.path}.{name}")
        inner._known = set(words)
        threads = {lane: inner.number(str(lane), None, least=1, most=256, whole=True) for lane in Lane}
        inner.finish()
        return {lane: int(count) for lane, count in threads.items() if count is not None}

    def finish(self) -> None:
        """Raise ConfigError for the first field that no check asked for."""
        for name in self._values:
            if name not in self._known:
                where = f"{self.path}.{name}"
                raise ConfigError(f"{where}: unknown field{nearest(name, self._known)}", field=where)
