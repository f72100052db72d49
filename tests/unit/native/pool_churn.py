"""A process that uses every operation of a pool as fast as it can; a test kills it at any moment.

    python -m tests.unit.native.pool_churn INDEX_FD EXTENTS_FD REPORT_FD SEED

Adopts the pool in the two descriptors and reports to REPORT_FD, one line per operation: `lease TICKET PROMPT CHUNKS`
after a lease was granted, `release TICKET` before it ends, anything else otherwise.
"""

from __future__ import annotations

import os
import random
import sys

from kvstrata.native.core import Hold, Pool, RecordSpec, seal_record
from kvstrata.types import unpack_extents
from tests.harness.pool_files import IDENTITY, PAGE, key

SIZES = (2 * PAGE, 3 * PAGE)
PROMPTS, CHUNKS = 12, 5
SESSIONS = (b"a" * 16, b"b" * 16)


def fill_of(name: bytes) -> bytes:
    """Every payload byte of a key's record."""
    return name[:1]


def check_contents(pool: Pool) -> None:
    """Assert that every READY chunk holds its own bytes."""
    for prompt in range(PROMPTS):
        for chunk in range(CHUNKS):
            name = key(prompt, chunk)
            hold = pool.hold(name)
            if hold is None:
                continue
            with hold:
                payload = bytes(hold.view()[PAGE:])
            if payload != fill_of(name) * len(payload):
                raise AssertionError(f"foreign bytes in prompt {prompt}, chunk {chunk}")


def churn(pool: Pool, report_fd: int, chance: random.Random) -> None:
    """Never ends."""
    rows = [pool.claim_row(session, b"g" * 16, os.getpid()) for session in SESSIONS]
    tickets: list[int] = []
    leases: list[int] = []
    holds: list[Hold] = []

    def report(line: str) -> None:
        os.write(report_fd, line.encode() + b"\n")

    while True:
        prompt, count = chance.randrange(PROMPTS), chance.randint(1, CHUNKS)
        names = [key(prompt, chunk) for chunk in range(count)]
        keys = b"".join(names)
        match chance.randrange(8):
            case 0 | 1 | 2:
                row = chance.choice([0, *rows])
                ticket, outcomes, packed = pool.reserve(keys, b"", chance.choice(SIZES), row, IDENTITY)
                extents = unpack_extents(packed)
                for i, outcome in enumerate(outcomes):
                    if outcome:
                        continue
                    extent = extents[i]
                    hold = pool.hold(None, ticket, i)
                    assert hold is not None
                    with hold:
                        hold.view()[PAGE:] = fill_of(names[i]) * (extent.length_bytes - PAGE)
                        address = pool.extents_address + extent.offset_bytes
                        spec = RecordSpec(names[i], IDENTITY, bytes(32), b"", 256)
                        seal_record(address, extent.length_bytes, spec, [extent.length_bytes - PAGE])
                    if chance.random() < 0.9:
                        assert pool.commit(ticket, [i]) == b"\0"
                if ticket:
                    tickets.append(ticket)
            case 3:
                ticket, n_chunks, *_ = pool.lease(keys, 1, chance.choice([rows, rows[:1]]))
                if ticket:
                    leases.append(ticket)
                    report(f"lease {ticket} {prompt} {n_chunks}")
            case 4 if leases:
                ticket = leases.pop(chance.randrange(len(leases)))
                report(f"release {ticket}")
                pool.release(ticket)
            case 5 if tickets:
                pool.abort(tickets.pop(chance.randrange(len(tickets))))
            case 6:
                hold = pool.hold(names[-1])
                if hold is not None:
                    holds.append(hold)
                if len(holds) > 5:
                    holds.pop(chance.randrange(len(holds))).drop()
            case 7:
                pool.verify(keys)
                if chance.random() < 0.1:
                    pool.remove(keys)
        report("done")


def main() -> None:
    """Command line."""
    index_fd, extents_fd, report_fd, seed = (int(word) for word in sys.argv[1:])
    os.write(report_fd, b"begin\n")
    pool = Pool.adopt(index_fd, extents_fd)
    for row in pool.rows():
        pool.row_quiesced(row["row"])
    churn(pool, report_fd, random.Random(seed))


if __name__ == "__main__":
    main()
