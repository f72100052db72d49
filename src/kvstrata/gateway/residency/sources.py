"""Finds where an engine publishes its KV events, from the settings or from the engine's own response."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvstrata.config.gateway_model import EngineSettings

OFF = "off"
MAX_PORT = 65_535
MAX_RANKS = 1_024


class Source(NamedTuple):
    """The endpoints at which an engine publishes its KV events."""

    endpoint: str
    """tcp://HOST:PORT; empty: it publishes none."""
    replay: str = ""
    """Endpoint of the replay; empty: it replays nothing."""
    topic: str = ""


class _Publisher(msgspec.Struct):
    """The publisher of one rank in vLLM's response to /kv_event_sources."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = ""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    topic: str = ""


_decode = msgspec.json.Decoder(dict[int, _Publisher]).decode


def source_of(settings: EngineSettings) -> Source | None:
    """The source by the settings; without an endpoint if they say `off`; None if the engine is to be asked."""
    if settings.kv_events == OFF:
        return Source("")
    return Source(settings.kv_events, settings.kv_events_replay) if settings.kv_events else None


def sources_in(body: bytes, host: str) -> list[Source]:
    """The sources in an engine's response, at the engine's own host, in the order of its data-parallel ranks.

    Empty if it publishes nothing.  Raises ValueError if the endpoints are unusable, or the response is not vLLM's.
    """
    try:
        ranks = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"unexpected answer of /kv_event_sources: {error}") from None
    there = {
        rank: one for rank, one in ranks.items() if one.enable_kv_cache_events and one.publisher != "null"
    }
    if len(there) > MAX_RANKS:
        raise ValueError(f"{len(there)} data-parallel ranks publish KV events, of at most {MAX_RANKS}")
    if 0 < len(there) < len(ranks):
        raise ValueError(f"only {len(there)} of its {len(ranks)} data-parallel ranks publish KV events")
    return [_source(one, host) for _, one in sorted(there.items())]


def _source(one: _Publisher, host: str) -> Source:
    replay = _at(one.replay_endpoint, host) if one.replay_endpoint and one.buffer_steps > 0 else ""
    return Source(_at(one.endpoint, host), replay, one.topic)


def of_rank(source: Source, rank: int) -> Source:
    """The source of a rank; `source`: that of rank 0. Raises ValueError if the port would be above MAX_PORT."""
    return source._replace(endpoint=_above(source.endpoint, rank), replay=_above(source.replay, rank))


def _above(endpoint: str, rank: int) -> str:
    if not endpoint:
        return ""
    place, _, port = endpoint.rpartition(":")
    number = int(port) + rank
    if number > MAX_PORT:
        raise ValueError(f"rank {rank} would publish at port {number} of {place}")
    return f"{place}:{number}"


def _at(endpoint: str, host: str) -> str:
    """An endpoint's port at the engine's host, so that an engine cannot make the gateway connect to another host."""
    scheme, _, rest = endpoint.partition("://")
    port = rest.rpartition(":")[2]
    if scheme != "tcp" or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= MAX_PORT:
        raise ValueError(f"its events are at {endpoint!a:.100}, which is not tcp://HOST:PORT")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
