"""Which ports the transfer engines may open."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.p2p.engines import ports


@pytest.mark.parametrize(
    ("environment", "tcp", "this_host_only", "settings"),
    [
        ({}, False, True, {"TLS": "^tcp"}),
        ({}, False, False, {"TLS": "^tcp"}),
        ({}, True, True, {"NET_DEVICES": "lo"}),
        ({}, True, False, {}),
        ({"UCX_TLS": "tcp"}, False, True, {"NET_DEVICES": "lo"}),
        ({"UCX_TLS": "tcp"}, False, False, {}),
        ({"UCX_NET_DEVICES": "eth1"}, False, True, {"TLS": "^tcp"}),
        ({"UCX_NET_DEVICES": "eth1"}, True, True, {}),
    ],
)
def test_tcp_is_left_out_unless_a_setting_or_ucx_tls_asks_for_it(
    environment: dict[str, str], tcp: bool, this_host_only: bool, settings: dict[str, Any]
) -> None:
    assert ports.ucx_settings(environment, tcp=tcp, this_host_only=this_host_only) == settings
