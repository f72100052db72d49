"""A real etcd answers each call as tests/oracles/etcd.py does, over which elections are tested."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller import etcd
from tests.harness import etcd_server
from tests.harness.amount import amount
from tests.harness.etcd_server import EtcdServer
from tests.harness.virtual import VirtualLoop
from tests.oracles.etcd import EtcdInMemory

pytestmark = pytest.mark.integration
FOLDERS = itertools.count()
KEYS = st.sampled_from(["x", "y", "z/1", "z/2"])
NUMBERS = st.integers(0, 6)
"""0: none; else the nth last revision or lease."""
COMPARES = st.tuples(st.sampled_from(["created", "modified", "owned"]), KEYS, NUMBERS)
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(0, 2)),
    st.tuples(st.sampled_from(["read", "delete"]), KEYS),
    st.tuples(st.just("read_all"), st.just("z/")),
)
BRANCHES = st.lists(
    OPERATIONS, max_size=4, unique_by=lambda one: one[1] if one[0] in ("put", "delete") else one
)
"""etcd refuses two writes of one key."""
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.sampled_from([1, 600, 600])),
        st.tuples(st.sampled_from(["keep_alive", "revoke"]), st.integers(1, 3)),
        *[st.tuples(st.just("transact"), st.lists(COMPARES, max_size=2), BRANCHES, BRANCHES)] * 4,
    ),
    min_size=5,
    max_size=25,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    etcd_server.ensure()
    folder: Path = tmp_path_factory.mktemp("etcd")
    with EtcdServer(folder) as running:
        yield running


async def answers(connection: Any, calls: list[Any]) -> list[object]:
    """What it answers; revisions count from the first one, leases in the order in which they were granted."""
    prefix = f"test-{next(FOLDERS)}/".encode()
    first = (await connection.transact([], [etcd.read(prefix)])).revision
    revisions, leases, told = [0, first], [0], list[object]()

    def operation(name: str, key: str, *lease: int) -> Any:
        if name == "put":
            return etcd.put(prefix + key.encode(), b"value", leases[min(lease[0], len(leases) - 1)])
        return getattr(etcd, name)(prefix + key.encode())

    def compare(name: str, key: str, number: int) -> Any:
        known = leases if name == "owned" else revisions
        return getattr(etcd, name)(prefix + key.encode(), known[-number] if 0 < number <= len(known) else 0)

    for name, *arguments in calls:
        try:
            if name == "grant":
                lease, ttl_s = await connection.grant(*arguments)
                told.append(ttl_s)
                if ttl_s < 600:  # its end would change the revision at another time
                    await connection.revoke(lease)
                else:
                    leases.append(lease)
            elif name == "transact":
                compares, success, failure = arguments
                answer = await connection.transact(
                    [compare(*one) for one in compares],
                    [operation(*one) for one in success],
                    [operation(*one) for one in failure],
                )
                revisions.append(answer.revision)
                told.append(
                    (
                        answer.succeeded,
                        answer.revision - first,
                        {
                            key.removeprefix(prefix): (
                                row.value,
                                row.create_revision - first,
                                row.mod_revision - first,
                                leases.index(row.lease),
                            )
                            for key, row in answer.rows.items()
                        },
                    )
                )
            else:
                lease = leases[arguments[0]] if arguments[0] < len(leases) else 12_345
                told.append(await getattr(connection, name)(lease))
        except etcd.EtcdFailed as error:
            told.append((str(error), error.refused, error.lease_lost))
    for lease in leases[1:]:
        with contextlib.suppress(etcd.EtcdFailed):
            await connection.revoke(lease)
    await connection.close()
    return told


@settings(max_examples=amount(15, 500), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_a_real_etcd_and_the_one_in_memory_give_the_same_answers(
    server: EtcdServer, calls: list[Any]
) -> None:
    endpoint = etcd.read_endpoint(server.address)
    of_tests = EtcdSettings(endpoints=[server.address])
    real = asyncio.run(answers(etcd.Etcd(endpoint, of_tests, 60.0), calls))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(answers(EtcdInMemory().connect(endpoint, of_tests, 60.0), calls)) == real
