"""A version of vLLM that nobody has tested: it starts if it differs in nothing that the connector needs."""

from __future__ import annotations

import subprocess

import pytest

from tests.harness import vllm_env
from tests.harness.server_process import ServerProcess
from tests.tools.families import Family
from tests.vllm.versions_planted import planted

pytestmark = [pytest.mark.vllm, pytest.mark.long]

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
SCHEDULER = "v1/core/sched/scheduler.py"


def test_an_unknown_version_that_differs_in_nothing_serves_and_the_log_says_what_was_checked(
    vllm_python, tmp_path
):
    family = Family("19m", [700, 1000], tmp_path, in_front=planted(tmp_path / "planted", "0.99.0"))
    with ServerProcess(tmp_path / "server", l1_mb=64) as server:
        server.start()
        with family.engine(server) as vllm:
            log = vllm.log_text()
            assert "vLLM 0.99.0 is not among the versions that this connector is tested with (0.30.0" in log
            assert log.count("a store and a load of 3 chunks; nothing differs") == 1, log
            family.compute(vllm)
            assert family.load(vllm, "its own records").good


RENAMED = (BASE, r"def request_finished_all_groups\(", "def request_ended(")
OTHER_SIGNATURE = (
    BASE,
    r"(def update_connector_output\(self), connector_output",
    r"\1, step: int, connector_output",
)
NEVER_LOADS = (SCHEDULER, r"(get_blocks\(request_id\),\s*)num_external_computed_tokens,", r"\g<1>0,")


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        (
            [RENAMED, OTHER_SIGNATURE],
            [
                "vLLM's connectors have no request_finished_all_groups any more",
                "update_connector_output takes",
            ],
        ),
        ([NEVER_LOADS], ["of 3 chunks were loaded"]),
    ],
    ids=["names", "behaviour"],
)
def test_an_unknown_version_that_differs_is_refused_with_the_difference(edits, told, vllm_python, tmp_path):
    environment = vllm_env.environment(tmp_path, planted(tmp_path / "planted", "0.99.0", *edits))
    done = subprocess.run(
        [str(vllm_python), "-P", "-c", "from kvstrata.connectors.vllm import LMCacheConnectorV1"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode != 0
    error = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: vllm: vLLM 0.99.0 is not among" in error, done.stderr[-3000:]
    assert all(difference in error for difference in told), error
