"""Our storage under SGLang's own code: its base class, host pools and cache controller, as its wheel has them.

There is no model and no GPU: the pools of the device lie in host memory too, and the test plays the radix tree.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from tests.harness import vllm_env
from tests.harness.child import ROOT, Child
from tests.harness.server_process import ServerProcess
from tests.sglang import engine_child
from tests.sglang.engine_child import PAGE_TOKENS
from tests.tools import fetch_wheels

pytestmark = [pytest.mark.long, pytest.mark.sglang]

TIMEOUT_S = 2.0
NAMES = [f"{number:064x}" for number in range(1, 7)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=64) as server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def engine(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A child with SGLang's wheel; importing it takes most of the time of these tests."""
    wheel, python = fetch_wheels.find(fetch_wheels.SGLANG), vllm_env.find()
    if wheel is None or python is None:
        pytest.skip("SGLang's wheel is not here; to fetch it (50 MB) and run these tests: make test-sglang")
    variables = {
        "KVSTRATA_SOCKET_DIR": str(server.socket_dir),
        "KVSTRATA_LOOKUP_TIMEOUT_MS": str(round(1000 * TIMEOUT_S)),
    }
    with engine_child.child(python, wheel, tmp_path_factory.mktemp("sglang"), **variables) as child:
        yield child


def started(
    engine: Child, kind: str = "mha", layout: str = "page_first", **more: object
) -> dict[str, object]:
    facts = engine.ask("start", kind=kind, layout=layout, **more)
    engine.ask("wait_connected")
    return facts


@pytest.mark.parametrize(
    ("kind", "layout", "runs"),
    [
        ("mha", "layer_first", 6),
        ("mha", "page_first", 2),
        ("mha", "page_first_direct", 2),
        ("mha", "page_head", 2),
        ("mla", "layer_first", 3),
        ("mla", "page_first", 1),
        ("mla", "page_first_direct", 1),
    ],
)
def test_pages_of_each_layout_come_back_as_they_were(engine, kind, layout, runs):
    facts = started(engine, kind, layout)
    assert facts["runs"] == runs
    assert facts["zero_copy"] == "_page_get_zero_copy"
    assert engine.ask("exists", names=NAMES) == 0, "the layouts and models share nothing"
    assert engine.ask("set", names=NAMES[:4]) == [True] * 4
    assert engine.ask("exists", names=NAMES) == 4
    assert engine.ask("exists", names=[NAMES[5], *NAMES[:4]]) == 0, "it counts up to the first missing page"
    assert engine.ask("get", names=NAMES[:5], first_page=20) == ["right"] * 4 + ["missing"]
    assert engine.ask("get", names=[NAMES[5], NAMES[0]], first_page=20) == ["missing"] * 2
    last = facts["pages"] - 1
    assert engine.ask("set", names=[NAMES[4]], first_page=last) == [True]
    assert engine.ask("get", names=[NAMES[4]], first_page=last) == ["right"]


def test_the_threads_of_sglangs_controller_store_and_load_a_prompt(engine):
    started(engine, arguments={"weight_version": "threads"})
    tokens = list(range(8 * PAGE_TOKENS))
    assert engine.ask("prefetch", tokens=tokens)["found"] == 0
    assert engine.ask("backup", tokens=tokens) == 8 * PAGE_TOKENS
    longer = [*tokens, *range(2 * PAGE_TOKENS)]
    got = engine.ask("prefetch", tokens=longer)
    assert got == {"found": 8 * PAGE_TOKENS, "loaded": 8 * PAGE_TOKENS, "verdicts": ["right"] * 8}
    told = engine.ask("metrics")
    assert told["prefetch_pgs"] == [8] and told["backup_pgs"] == [8]
    assert len(told["prefetch_bandwidth"]) == len(told["backup_bandwidth"]) == 1
    assert engine.ask("metrics")["backup_pgs"] == []


def test_several_pools_give_the_prefixes_that_all_of_them_have(engine):
    started(engine, arguments={"weight_version": "pools"})
    got = engine.ask("pools", names=NAMES[:5], states=[1, 3])
    assert got == {
        "set": [True] * 12,
        "found": 4,
        "restorable": [2, 4],
        "got": [True] * 5,
        "right": [True] * 5,
    }


def test_the_command_on_the_page_is_one_that_sglang_understands(engine):
    page = (ROOT / "docs" / "engines.md").read_text()
    command = page.partition("```\npython -m sglang.launch_server ")[2].partition("```")[0]
    told = engine.ask("parsed", words=shlex.split(command.replace("\\\n", " ")))
    assert (told["page_size"], told["layout"], told["storage"]) == (64, "page_first", "dynamic")
    extra = told["extra"]
    assert extra.pop("hicache_storage_pass_prefix_keys") is True
    started(engine, extra=extra)


def test_methods_have_the_parameters_of_the_base_class_and_clearing_is_refused(engine):
    started(engine)
    assert engine.ask("signatures") == []
    assert "kvstrata ctl clear" in engine.ask("clear")
