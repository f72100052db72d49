"""Which ports the transfer engines may open."""

from __future__ import annotations

from kvstrata.p2p.engines import ports


def test_tcp_is_left_out_unless_a_setting_or_ucx_tls_asks_for_it() -> None:
    for environment, tcp, this_host_only, settings in (
        ({}, False, False, {"TLS": "^tcp"}),
        ({}, True, True, {"NET_DEVICES": "lo"}),
        ({}, True, False, {}),
        ({"UCX_TLS": "tcp"}, False, True, {"NET_DEVICES": "lo"}),
        ({"UCX_NET_DEVICES": "eth1"}, True, True, {}),
    ):
        found = ports.ucx_settings(environment, tcp=tcp, this_host_only=this_host_only)
        assert found == settings, (environment, tcp, this_host_only)
