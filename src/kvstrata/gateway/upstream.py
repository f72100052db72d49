"""The client with which the gateway talks to engines.  It never reads a body further than the answer's reader has come,
so an engine's answer waits in the engine while the gateway's client reads slowly.
"""

from __future__ import annotations

import aiohttp

KEPT_S = 4.0
"""vLLM closes a connection after 5 s without a request: a connection must be given up here before that."""
BUFFER_BYTES = 64 << 10
MAX_HEADER_BYTES = 32 << 10


def make_session(connect_s: float) -> aiohttp.ClientSession:
    """A session without cookies, redirects by itself, proxies of the environment, or a bound on its connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEPT_S, ttl_dns_cache=5),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=None),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=BUFFER_BYTES,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        trust_env=False,
    )
