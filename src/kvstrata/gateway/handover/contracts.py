"""The hand-over contracts: the `kv_transfer_params` of the engine that prefills a prompt, and of the one that decodes.

`kvstrata`: content keys are the whole protocol.  Both engines get the request at once.  The prefilling engine's
connector promises the chunks of its prompt to their `lmcache-server`, and the decoding engine waits there for them
(`kvstrata.wait_ms`), or its server waits at the other's instance (`kvstrata.from`).  It computes chunks that do not
arrive.

`nixl`, vLLM's NixlConnector: the decoding engine reads the memory of the prefilling one, whose reply comes first and
says where its blocks lie; it keeps them until they are read, or for 30 s.  The gateway passes that reply on unread.

`mooncake`, vLLM's MooncakeConnector: the prefilling engine writes into the memory of the decoding one.  Both get the
same new transfer id; the decoding engine also gets the other's engine id, which changes at each start and comes from
its bootstrap server.  The prefilling engine keeps the blocks until they are fetched, or for 480 s, but only if its
answer ended at one token, and not by a stop.  vLLM would let the decoding engine wait just as long for absent blocks,
so that engine gets the request only after such an answer.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.engine_http import Address, Asker, LinkBroken, Unreachable
from kvstrata.gateway.fleet import ServingEngine
from kvstrata.patience import patience
from kvstrata.process.ports import host_and_port

Fields = dict[str, Any]
"""Fields of `kv_transfer_params`."""
LEAST_WAIT_MS, MOST_WAIT_MS = 1_000, 60_000
"""The connector of `kvstrata` waits 60 s at most."""
PORT = 8_998
"""vLLM's default of Mooncake's bootstrap servers."""
TELLS_S = 2.0
"""Time for the bootstrap server's answer."""
MAX_BYTES = 1 << 20


class _Engine(msgspec.Struct):
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


_engines = msgspec.json.Decoder(dict[str, _Engine]).decode


@dataclass(slots=True)
class Handover:
    """The hand-over of one request, by its contract."""

    contract: Contract
    prefill: ServingEngine
    expected_s: float
    """Expected seconds until `prefill` has computed the prompt."""
    source: str
    """The other host's instance, if there are two."""
    transfer: str = field(default_factory=lambda: secrets.token_hex(16))

    def for_prefill(self) -> Fields:
        """The fields for the prefilling engine: to keep the blocks for another one; empty: none."""
        if self.contract == "kvstrata":
            return {}
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.contract == "mooncake":
            return keep | {"transfer_id": self.transfer}
        nobody = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        return keep | dict.fromkeys(nobody)

    async def for_answer(self, asker: Asker, leg: asyncio.Task[Fields | None]) -> Fields:
        """The fields for the decoding engine; empty: it computes the prompt itself.

        `leg`: the fields in the prefilling engine's answer, possibly none; None: it failed.
        """
        if self.contract == "kvstrata":  # twice as long as the prompt is expected to take, and a second
            wait_ms = min(MOST_WAIT_MS, LEAST_WAIT_MS + round(2_000 * max(0.0, self.expected_s)))
            return {"kvstrata.wait_ms": wait_ms} | ({"kvstrata.from": self.source} if self.source else {})
        returned = await leg
        if self.contract == "nixl":  # a prompt shorter than a block has none
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

    async def _engine_id(self, asker: Asker, bootstrap: Address) -> str | None:
        """The id of the engine, or of its rank; None: the bootstrap server did not give it."""
        try:
            async with asyncio.timeout(patience(TELLS_S)):
                status, raw = await asker.ask(bootstrap, "GET", "/query", {}, most_bytes=MAX_BYTES)
            found = _engines(raw).get(str(self.prefill.rank or 0)) if status == 200 else None
        except (Unreachable, LinkBroken, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found.engine_id if found is not None else None
