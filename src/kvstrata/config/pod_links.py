"""Variables that Kubernetes sets in every pod for each service of its namespace, and Docker for links of containers.

A service `kvstrata` gives KVSTRATA_SERVICE_HOST, KVSTRATA_PORT=tcp://10.0.0.1:8080 and others, which look like settings
of ours.  Name and value together tell them apart: KVSTRATA_PORT=8080 is a setting.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping

PREFIXES = ("KVSTRATA_", "LMCACHE_")

_NUMBERED = r".*_PORT_\d{1,5}_(?:TCP|UDP|SCTP)"
_URL = re.compile(r"(?:tcp|udp|sctp)://(\[[0-9A-Fa-f:.]+\]|[^\s/\[\]]+):\d{1,5}")


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_number(value: str) -> bool:
    return re.fullmatch(r"\d{1,5}", value) is not None


def _is_url(value: str) -> bool:
    return _URL.fullmatch(value) is not None


_FORMS: tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...] = (
    (re.compile(r".*_SERVICE_HOST"), _is_address),
    (re.compile(r".*_SERVICE_PORT(?:_[A-Z0-9_]+)?"), _is_number),
    (re.compile(rf".*_PORT|{_NUMBERED}"), _is_url),
    (re.compile(rf"{_NUMBERED}_PROTO"), ("tcp", "udp", "sctp").__contains__),
    (re.compile(rf"{_NUMBERED}_PORT"), _is_number),
    (re.compile(rf"{_NUMBERED}_ADDR"), _is_address),
)
"""Forms of the names, each with what its values look like."""


def is_pod_link(name: str, value: str) -> bool:
    """Whether Kubernetes or Docker has set this variable for a service whose name begins like ours."""
    return name.startswith(PREFIXES) and any(form.fullmatch(name) and fits(value) for form, fits in _FORMS)


def pod_link_notes(environment: Mapping[str, str]) -> list[str]:
    """A note for the log, if there are such variables."""
    names = sorted(name for name, value in environment.items() if is_pod_link(name, value))
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [
        f"environment: {', '.join(names[:3])}{more}: ignored, since Kubernetes or Docker has set them for a service of "
        "that name; `enableServiceLinks: false` in the pod leaves them out"
    ]
