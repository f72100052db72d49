"""What all tests share: markers, the rule for skips in CI, and real vLLM.

A test without a marker counts as `fast`. With CI=true, a skipped `integration` or `vllm` test is a failure:
what such a test needs is there or can be fetched, so a skip would only hide that it did not run. `gpu` tests
may skip, and the contract suite may skip what an adapter says that it cannot do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.harness import fetch_wheels, mooncake, vllm_env, vllm_model

IN_CI = os.environ.get("CI") == "true"
KINDS = ("fast", "integration", "vllm", "gpu")
REQUIRED_IN_CI = ("integration", "vllm")
CONTRACT = "kvstrata/testing/adapter_contract.py"

# No test may depend on how fast the machine is; a failure prints what reproduces it.
hypothesis.settings.register_profile("kvstrata", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("kvstrata"), max_examples=2_000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvstrata"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest files first, so that the workers end together.
    items.sort(key=lambda item: item.path.parent.name != "vllm")
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker("fast")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
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
    """A module that skips itself as a whole has no items whose markers could be seen; only tests/gpu may."""
    report = yield
    gpu_folder = Path(__file__).parent / "gpu"
    if IN_CI and report.skipped and gpu_folder not in collector.path.parents:
        report.outcome = "failed"
        report.longrepr = f"the whole module is skipped, and CI=true requires it: {skip_reason(report)}"
    return report


def _is_of_contract(report: pytest.TestReport) -> bool:
    """The shipped contract suite itself has skipped the test."""
    return isinstance(report.longrepr, tuple) and Path(report.longrepr[0]).match(CONTRACT)


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of the environment with real vLLM; a test is skipped where there is none."""
    try:
        return vllm_env.ensure()
    except vllm_env.Unavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture(scope="session")
def vllm_model_folder(vllm_python: Path) -> Callable[[str], Path]:
    """Gives the folder of a random-weight model by its size: "19m" or "160m"."""
    return vllm_model.ensure_model


@pytest.fixture
def vllm_environment(vllm_python: Path, tmp_path: Path) -> dict[str, str]:
    """Variables for a process that runs vLLM with this clone's kvstrata; its state goes to tmp_path."""
    return vllm_env.environment(tmp_path / "vllm-state")


@pytest.fixture(scope="session")
def mooncake_environment() -> dict[str, str]:
    """Variables for a process that uses Mooncake; a test is skipped where it cannot be had."""
    try:
        return mooncake.environment()
    except mooncake.Unavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture(scope="module")
def mooncake_variables(mooncake_environment: dict[str, str]) -> Iterator[None]:
    """This process's adapter hosts find Mooncake as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", mooncake_environment["LD_LIBRARY_PATH"])
        patch.syspath_prepend(mooncake.ensure())
        yield


@pytest.fixture(scope="session")
def nixl_environment() -> dict[str, str]:
    """Variables for a process that uses NIXL; a test is skipped where it cannot be had."""
    try:
        return fetch_wheels.environment(fetch_wheels.NIXL)
    except fetch_wheels.Unavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture(scope="module")
def redis_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for Redis servers of a module (tests/harness/redis_server.py); a test is skipped without Redis."""
    from tests.harness import redis_server

    try:
        redis_server.ensure()
    except redis_server.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    return tmp_path_factory.mktemp("redis")
