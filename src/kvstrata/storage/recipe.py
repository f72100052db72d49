"""The settings that make the medium of a tier, in the server or in the child process of an isolated tier."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvstrata.storage import catalogue
from kvstrata.storage.catalogue import Make
from kvstrata.storage.structs import Place


class Recipe(NamedTuple):
    """One tier's medium, checked."""

    medium: str
    """MODULE:ATTRIBUTE of the medium's type, for `catalogue.load`."""
    config: msgspec.Struct
    """The medium's fields, in its type's struct."""
    place: Place
    """Where the fields stand in the settings, for errors."""
    name: str
    """The tier's name."""

    def prepare(self) -> Make:
        """Check the fields, and return the function that makes the bare adapter. Raises ConfigError."""
        return catalogue.load(self.medium).prepare(self.config, self.place, self.name)
