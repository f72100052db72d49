"""A child process that times reads of another process's registered memory by our NIXL engine or bare NIXL.

The owner of the memory runs this module, too.  Both take requests as JSON lines (tests/harness/child.py).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tests.harness import child
from tests.harness.transfer_peer import Memory, Peer

POLL_S = 50e-6


class Engine(Peer):
    """Our NIXL engine. A read is timed from its call to its answer on the event loop."""

    def time_read(self, items: list[list[int]], times: int) -> list[float]:
        """Read `items` `times` times; return the seconds of each read."""
        took = []
        for _ in range(times):
            begun_s = time.perf_counter()
            reason, ended = self.read("owner", items)
            took.append(time.perf_counter() - begun_s)
            assert (reason, ended) == ("", 1), reason
        return took


class Bare:
    """NIXL used as in its own examples: with its progress thread, prepared lists, and a loop that polls the state."""

    def __init__(self) -> None:
        os.environ.setdefault("UCX_MODULES", "^ib")
        os.environ.setdefault("UCX_LOG_FILE", "stderr")
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"bare-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self.memory = self.owner = self.bases = self.prepared = None

    def open(self, length: int, seed: int) -> str:
        """Register memory of this length; return the metadata in hexadecimal."""
        self.memory = Memory(length, seed)
        region = self.memory.region
        self.agent.register_memory([(region.address, region.length, 0, "")], "DRAM")
        return f"{region.address:016x}{self.agent.get_agent_metadata().hex()}"

    def connect(self, peer: str, metadata: str) -> None:
        """Add the other process; there is only one."""
        self.bases = int(metadata[:16], 16)
        self.owner = self.agent.add_remote_agent(bytes.fromhex(metadata[16:]))

    def time_read(self, items: list[list[int]], times: int) -> list[float]:
        """Read `items` `times` times; return the seconds of each read."""
        agent = self.agent
        local = [(self.memory.region.address + item[1], item[2], 0) for item in items]
        remote = [(self.bases + item[0], item[2], 0) for item in items]
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), self.owner
        )
        took = []
        for _ in range(times):
            begun_s = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            took.append(time.perf_counter() - begun_s)
            assert state == "DONE", state
        handle.release()
        return took

    def checksum(self, offset: int, length: int) -> int:
        """Return the CRC-32 of a part of this process's memory."""
        return Peer.checksum(self, offset, length)  # type: ignore[arg-type]


def main() -> None:
    """Serve until stdin ends."""
    name = sys.argv[1]
    # NIXL's logger writes to stdout, which carries our answers.
    answers, out = os.dup(1), os.dup(2)
    os.dup2(out, 1)
    reader: Any = Bare() if name == "bare" else Engine({})
    os.dup2(answers, 1)
    names = [name for name in dir(reader) if not name.startswith("_") and callable(getattr(reader, name))]
    child.serve({name: getattr(reader, name) for name in names})


if __name__ == "__main__":
    main()
