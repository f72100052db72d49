"""The contract `mooncake`: vLLM's MooncakeConnector, whose prefilling engine writes into the decoding one's memory.

Both engines are told the same new number of the transfer, and the one that answers also the other's id, which changes
whenever that starts: its bootstrap server tells it.  The one that computes keeps the blocks until they are fetched, or
for 480 s, but only if its answer ended at one token, and not by a stop; vLLM would let the other one wait as long for
blocks that are not there, so it answers later, and only then.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, ClassVar

import msgspec

from kvstrata.gateway.engine_http import Address, Asker, LinkBroken, Unreachable
from kvstrata.gateway.fleet import ServingEngine
from kvstrata.gateway.handover.contract import Fields, Handover
from kvstrata.process.ports import host_and_port

PORT = 8_998
"""vLLM's default."""
TELLS_S = 2.0
"""Time for the bootstrap server's answer."""
MAX_BYTES = 1 << 20


class _Engine(msgspec.Struct):
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


_engines = msgspec.json.Decoder(dict[str, _Engine]).decode


class ByMooncake(Handover):
    """See the module."""

    answers_later: ClassVar[bool] = True

    def __init__(self, asker: Asker, prefill: ServingEngine, expected_s: float, source: str) -> None:
        """As for all contracts."""
        super().__init__(asker, prefill, expected_s, source)
        self._transfer = secrets.token_hex(16)

    def for_prefill(self) -> Fields:
        """Keep the blocks for the engine that names this transfer."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self._transfer}

    async def for_answer(self, returned: Fields | None) -> Fields:
        """Whose blocks to fetch."""
        place = self.prefill.place
        host, port = host_and_port(place.bootstrap) if place.bootstrap else (place.address.host, PORT)
        host = "127.0.0.1" if host.startswith("/") else host
        engine_id = await self._engine_id(Address(host, port, False)) if returned is not None else None
        if engine_id is None:
            return {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": self._transfer,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        }

    async def _engine_id(self, bootstrap: Address) -> str | None:
        """The id of the engine, or of its rank; None: it is not told."""
        try:
            async with asyncio.timeout(TELLS_S):
                status, raw = await self.asker.ask(bootstrap, "GET", "/query", {}, most_bytes=MAX_BYTES)
            found = _engines(raw).get(str(self.prefill.rank or 0)) if status == 200 else None
        except (Unreachable, LinkBroken, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found.engine_id if found is not None else None
