"""The hand-over contracts: the `kv_transfer_params` of the prefilling and the decoding engine of a split request.

`kvstrata`: chunk keys are the whole protocol.  Both engines get the request at once.  The prefilling engine's connector
promises the chunks of its prompt to its `lmcache-server`, and the decoding engine waits for them at the same server
(`kvstrata.wait_ms`), or its own server waits for them at the other instance (`kvstrata.from`).  The decoding engine
computes chunks that do not arrive.

`nixl`, vLLM's NixlConnector: the decoding engine reads the memory of the prefilling one, whose response comes first and
names its blocks; it keeps them until they are read, or for 30 s.  The gateway forwards that response unread.

`mooncake`, vLLM's MooncakeConnector: the prefilling engine writes into the memory of the decoding one.  Both get the
same new transfer id; the decoding engine also gets the other's engine id, which changes at each start and comes from
its bootstrap server.  The prefilling engine keeps the blocks until they are fetched, or for 480 s, but only if its
answer ended at the limit of one token, not by a stop.  vLLM would let the decoding engine wait just as long for missing
blocks, so that engine gets the request only after such an answer.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.engine_http import Address, HttpClient, LinkBroken, Unreachable
from kvstrata.gateway.fleet import ServingEngine
from kvstrata.patience import patience
from kvstrata.process.ports import host_and_port

Fields = dict[str, Any]
"""Fields of `kv_transfer_params`."""
LEAST_WAIT_MS, MOST_WAIT_MS = 1_000, 60_000
"""Range of `kvstrata.wait_ms`; the connector accepts at most 60 s."""
PORT = 8_998
"""vLLM's default port of Mooncake's bootstrap servers."""
TELLS_S = 2.0
"""Maximum time for the bootstrap server's response."""
MAX_BYTES = 1 << 20


class _Engine(msgspec.Struct):
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


_engines = msgspec.json.Decoder(dict[str, _Engine]).decode


@dataclass(slots=True)
class Handover:
    """The hand-over of one request."""

    contract: Contract
    prefill: ServingEngine
    expected_s: float
    """Expected time until `prefill` has computed the prompt."""
    source: str
    """Instance of `prefill`, if it is not the decoding engine's; else empty."""
    transfer: str = field(default_factory=lambda: secrets.token_hex(16))

    def for_prefill(self) -> Fields:
        """The fields for the prefilling engine, which make it keep the blocks for another engine; may be empty."""
        if self.contract == "kvstrata":
            return {}
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.contract == "mooncake":
            return keep | {"transfer_id": self.transfer}
        nobody = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        return keep | dict.fromkeys(nobody)

    async def for_answer(self, asker: HttpClient, leg: asyncio.Task[Fields | None]) -> Fields:
        """The fields for the decoding engine; empty: it computes the prompt itself.

        `leg`: gives the fields in the prefilling engine's response, maybe none; None: the prefill failed.
        """
        if self.contract == "kvstrata":  # wait for twice the prompt's expected time, and a second
            wait_ms = min(MOST_WAIT_MS, LEAST_WAIT_MS + round(2_000 * max(0.0, self.expected_s)))
            return {"kvstrata.wait_ms": wait_ms} | ({"kvstrata.from": self.source} if self.source else {})
        returned = await leg
        if self.contract == "nixl":  # the response for a prompt shorter than a block has no fields
            return returned if returned and returned.get("do_remote_prefill") else {}
        place = self.prefill.place
        host, port = host_and_port(place.bootstrap) if place.bootstrap else (place.address.host, PORT)
        host = "127.0.0.1" if host.startswith("/") else host
        engine_id = await self._engine_id(asker, Address(host, port, False)) if returned is not None else None
        if engine_id is None:
            return {}
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        both = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": self.transfer}
        return {**both, "remote_engine_id": engine_id, "remote_bootstrap_addr": at}

    async def _engine_id(self, asker: HttpClient, bootstrap: Address) -> str | None:
        """The id of the prefilling engine or rank, from its bootstrap server; None: not available."""
        try:
            async with asyncio.timeout(patience(TELLS_S)):
                status, raw = await asker.ask(bootstrap, "GET", "/query", {}, most_bytes=MAX_BYTES)
            found = _engines(raw).get(str(self.prefill.rank or 0)) if status == 200 else None
        except (Unreachable, LinkBroken, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found.engine_id if found is not None else None
