"""The decision about a version of vLLM, from what its dry run prints; real dry runs are in tests/vllm."""

from __future__ import annotations

import json
import logging
import subprocess
from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.compat import contract
from kvstrata.errors import ConfigError


@pytest.fixture
def dry_run(monkeypatch):
    """The dry run that would be started: set `stdout`, `stderr`, `returncode`; `calls` has its environments."""
    done = SimpleNamespace(stdout="", stderr="", returncode=0, calls=[])

    def run(command, *, env, **options):
        done.calls.append(env)
        return done

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv(contract.INHERITED, "")  # so that its value is restored
    return done


def printed(**verdict):
    return contract.MARK + json.dumps(contract.Verdict(**verdict)._asdict()) + "\n"


@pytest.mark.parametrize("version", [contract.TESTED[0], "0.32.0+cpu"])
def test_a_tested_version_starts_without_a_dry_run(dry_run, version):
    contract.check_vllm(version)
    assert not dry_run.calls


def test_a_version_that_differs_in_nothing_is_checked_once_for_all_processes_of_an_engine(dry_run, caplog):
    dry_run.stdout = "noise\n" + printed(names=1) + printed(names=41, signatures=29)
    with caplog.at_level(logging.WARNING, "vllm.kvstrata"):
        contract.check_vllm("0.34.0")
        contract.check_vllm("0.34.0")
    [environment] = dry_run.calls
    assert environment[contract.INHERITED] == "0.34.0"
    [line] = caplog.messages
    assert "vLLM 0.34.0" in line and "41 names, 29 signatures" in line


def test_a_version_that_differs_is_refused_each_time_with_every_difference(dry_run):
    dry_run.stdout = printed(differs=["one", "other"])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0 .*: one; other; use one of these versions"):
            contract.check_vllm("0.34.0")
    assert len(dry_run.calls) == 2


@pytest.mark.parametrize("stdout", ["", printed(names=41)])
def test_a_dry_run_that_ends_with_an_error_counts_as_a_difference(dry_run, stdout):
    dry_run.stdout, dry_run.returncode = stdout, 1
    dry_run.stderr = "Traceback …\nTypeError: Scheduler() takes 3 arguments\n"
    with pytest.raises(ConfigError, match=r"end with TypeError: Scheduler\(\) takes 3 arguments"):
        contract.check_vllm("0.34.0")


def test_a_dry_run_without_an_end_counts_as_a_difference(dry_run, monkeypatch):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="did not end within 900 s"):
        contract.check_vllm("0.34.0")
