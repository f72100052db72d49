"""Markers, the rule for skips in CI, and fixtures for third parties' programs, for all tests.

A test without a marker counts as `fast`. With CI=true, a skipped `integration` or `vllm` test is a failure: the
programs that such a test needs are installed or can be fetched, so a skip would only hide that it did not run. `gpu`
tests may skip, and the contract suite may skip operations that an adapter says it does not have.
"""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from kvstrata import text
from tests.harness import mooncake, own_commands, vllm_env, vllm_model
from tests.harness.amount import ALL
from tests.harness.daemon import DidNotStart, Unavailable
from tests.harness.forks import Forks
from tests.harness.prometheus import Promtool
from tests.tools import fetch_wheels

os.environ["KVSTRATA_TESTING"] = "1"  # permits servers with failpoints
PATIENCE = "KVSTRATA_PATIENCE"
os.environ[PATIENCE] = "20"  # no live process looks silent or too slow, however busy the machine is
# Under nohup it is ignored, and all processes that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
IN_CI = os.environ.get("CI") == "true"
KINDS = ("vllm", "integration", "sglang", "gpu", "fast")
REQUIRED_IN_CI = ("integration", "vllm")
CONTRACT = "kvstrata/testing/adapter_contract.py"

# No test may depend on how fast the machine is; a failure prints the blob that reproduces it. The gate draws the same
# examples each time; `make test-all` draws new ones.
hypothesis.settings.register_profile(
    "kvstrata",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
    derandomize=not ALL,
)
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("kvstrata"), max_examples=2_000, derandomize=False
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvstrata"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker("fast")
    # The longest files first, so that the workers end at about the same time.
    items.sort(key=lambda item: next(n for n, kind in enumerate(KINDS) if item.get_closest_marker(kind)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run what the gate has of tests/vllm: each worker that runs some imports vLLM for ten seconds."""
    if ALL or config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/vllm" if nodeid.startswith("tests/vllm/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the twenty files whose tests took the longest (docs/contributing.md has them)."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    slowest = sorted(seconds.items(), key=lambda entry: -entry[1])[:20]
    if sum(seconds.values()) > 60:
        terminalreporter.section("slowest files")
        for name, took in slowest:
            terminalreporter.write_line(f"{took:6.1f} s  {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests of silence, and the servers that their fixtures start, have the patience of production."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("silence"):
            patch.setenv(PATIENCE, "1")
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that needs what this machine cannot have; fail a skipped one in CI."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, Unavailable) and not isinstance(error, DidNotStart):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {error}")
    required = not item.get_closest_marker("gpu") and any(
        item.get_closest_marker(kind) for kind in REQUIRED_IN_CI
    )
    if (
        IN_CI
        and required
        and report.skipped
        and not hasattr(report, "wasxfail")
        and not _is_of_contract(report)
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped, and CI=true requires it: {skip_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skips itself in CI, since it has no tests whose markers could be seen; tests/gpu may skip."""
    report = yield
    gpu_folder = Path(__file__).parent / "gpu"
    if IN_CI and report.skipped and gpu_folder not in collector.path.parents:
        report.outcome = "failed"
        report.longrepr = f"the whole module is skipped, and CI=true requires it: {skip_reason(report)}"
    return report


@pytest.fixture
def patience_of_production(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that assert production's limits on a clock of their own, so that no machine is too busy for them."""
    monkeypatch.setenv(PATIENCE, "1")


@pytest.fixture(autouse=True, scope="session")
def _commands_are_forked() -> Iterator[None]:
    """Each command would else import for a second, and the tests start a thousand of them."""
    own_commands.forks = Forks()
    yield
    own_commands.forks.close()
    own_commands.forks = None


@pytest.fixture(autouse=True, scope="module")
def _secrets_are_forgotten() -> Iterator[None]:
    """Else a password in one module's tests would be left out of the messages that another module's tests expect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_known", text._known)
        yield


def _is_of_contract(report: pytest.TestReport) -> bool:
    """Whether the shipped contract suite itself has skipped the test."""
    return isinstance(report.longrepr, tuple) and Path(report.longrepr[0]).match(CONTRACT)


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of the environment with real vLLM; the test is skipped on a machine without it."""
    return vllm_env.ensure()


@pytest.fixture(scope="session")
def vllm_model_folder(vllm_python: Path) -> Callable[[str], Path]:
    """Returns the folder of a random-weight model by its size: "19m" or "160m"."""
    return vllm_model.ensure_model


@pytest.fixture(scope="session")
def mooncake_environment() -> dict[str, str]:
    """The environment of a process that uses Mooncake; the test is skipped on a machine that cannot have it."""
    return mooncake.environment()


@pytest.fixture(scope="module")
def mooncake_variables(mooncake_environment: dict[str, str]) -> Iterator[None]:
    """Lets the adapter hosts of this process find Mooncake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", mooncake_environment["LD_LIBRARY_PATH"])
        patch.syspath_prepend(mooncake.ensure())
        yield


@pytest.fixture(scope="session")
def nixl_environment() -> dict[str, str]:
    """The environment of a process that uses NIXL; the test is skipped on a machine that cannot have it."""
    return fetch_wheels.environment(fetch_wheels.NIXL)


@pytest.fixture(scope="module")
def redis_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for a module's Redis servers (tests/harness/redis_server.py); the test is skipped without Redis."""
    from tests.harness import redis_server

    redis_server.ensure()
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Prometheus' checker; the test is skipped on a machine that cannot have it."""
    return Promtool()
