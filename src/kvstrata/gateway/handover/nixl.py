"""The contract `nixl`: vLLM's NixlConnector, whose decoding engine reads the prefilling one's GPU memory.

The engine that computes answers first, and tells where its blocks lie; it keeps them until they are read, or for 30 s.
What it returns goes to the engine that answers unread.
"""

from __future__ import annotations

from typing import ClassVar

from kvstrata.gateway.handover.contract import Fields, Handover


class ByNixl(Handover):
    """See the module."""

    answers_later: ClassVar[bool] = True

    def for_prefill(self) -> Fields:
        """Keep the blocks for another engine, which is not known yet."""
        nobody = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        return {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nobody)}

    async def for_answer(self, returned: Fields | None) -> Fields:
        """What was returned, if it names blocks: a prompt shorter than a block has none."""
        return returned if returned and returned.get("do_remote_prefill") else {}
