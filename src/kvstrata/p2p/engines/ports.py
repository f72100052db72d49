"""Which ports a transfer engine may open.

Whoever reaches a tcp port of UCX can read and write the memory of its process: UCX 1.22 carries out what its peers ask
for over tcp without a check, and NIXL uses UCX.  So both engines leave tcp out unless `p2p.tcp` or UCX_TLS in the
environment asks for it.  Shared memory and kernel copies are between processes of one user, and RDMA cards check keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

RDMA = Path("/sys/class/infiniband")


def has_rdma_card() -> bool:
    """Whether this machine has an RDMA card, be it usable or not."""
    return RDMA.is_dir() and any(RDMA.iterdir())


def may_use_tcp(environment: Mapping[str, str], *, tcp: bool) -> bool:
    """Whether UCX may use tcp; `tcp` is `p2p.tcp`. UCX_TLS decides by itself what UCX uses."""
    return tcp or "UCX_TLS" in environment


def reaches_other_hosts(environment: Mapping[str, str], *, tcp: bool) -> bool:
    """Whether UCX has a transport that leads to other hosts: tcp, or an RDMA card."""
    return may_use_tcp(environment, tcp=tcp) or has_rdma_card()


def ucx_settings(environment: Mapping[str, str], *, tcp: bool, this_host_only: bool) -> dict[str, str]:
    """UCX's settings for an engine, without their prefix UCX_; what the environment sets is left to it."""
    if not may_use_tcp(environment, tcp=tcp):
        return {"TLS": "^tcp"}
    if this_host_only and "UCX_NET_DEVICES" not in environment:
        return {"NET_DEVICES": "lo"}
    return {}
