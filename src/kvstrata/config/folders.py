"""A user's folders by the XDG Base Directory specification."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping


def user_folder(environment: Mapping[str, str], variable: str, below_home: str) -> str:
    """The folder that `variable` names, else `below_home` in the user's home; empty if neither can be found.

    A relative path in the variable is ignored.
    """
    folder = environment.get(variable, "")
    if folder.startswith("/"):
        return folder
    home = environment.get("HOME", "")
    if not home.startswith("/"):
        home = os.path.expanduser(f"~{_user_name()}")
    return f"{home}/{below_home}" if home.startswith("/") else ""


def _user_name() -> str:
    """The name of the user that this process runs as; empty if the system has no name for its number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
