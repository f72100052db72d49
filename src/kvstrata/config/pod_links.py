"""Variables that Kubernetes sets in every pod for each service of its namespace, and Docker for links of containers.

A service `kvstrata` gives KVSTRATA_SERVICE_HOST, KVSTRATA_PORT=tcp://10.0.0.1:8080 and others, which look like settings
of ours.  Name and value together tell them apart: KVSTRATA_PORT=8080 is a setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LINK = re.compile(
    r"(?:KVSTRATA|LMCACHE)_.*?(?:"
    r"_?PORT(?:_\d+_(?:TCP|UDP|SCTP))?=(?:tcp|udp|sctp)://\S+:\d+"
    r"|_?PORT_\d+_(?:TCP|UDP|SCTP)_(?:PROTO|PORT|ADDR)=\S+"
    r"|_?SERVICE_HOST=[0-9A-Fa-f:.]+"
    r"|_?SERVICE_PORT(?:_[A-Z0-9_]+)?=\d{1,5})"
)


def is_pod_link(name: str, value: str) -> bool:
    """Whether Kubernetes or Docker has set this variable for a service whose name begins like ours."""
    return _LINK.fullmatch(f"{name}={value}") is not None


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
