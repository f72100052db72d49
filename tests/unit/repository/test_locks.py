"""`requirements/*.lock` pin what is declared, and files with other hashes are not installed."""

from __future__ import annotations

import hashlib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tools import locked, provision, setup_env, supply

MACHINES = [
    {
        "python_version": f"3.{minor}",
        "python_full_version": f"3.{minor}.9",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "os_name": "posix",
        "extra": "",
    }
    for minor in setup_env.SUPPORTED_MINORS
    for machine in ("x86_64", "aarch64")
]


def entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """Requirement and hashes of each package."""
    text = supply.lock_path(name).read_text().replace("\\\n", " ")
    lines = [line.split(" --hash=") for line in text.splitlines() if line and not line.startswith("#")]
    return [(Requirement(line[0].strip()), [each.strip() for each in line[1:]]) for line in lines]


def pins(name: str, machine: dict[str, str]) -> dict[str, Version]:
    found: dict[str, Version] = {}
    for requirement, _ in entries(name):
        if requirement.marker is None or requirement.marker.evaluate(machine):
            key = canonicalize_name(requirement.name)
            assert key not in found, f"{name}.lock: {key} has two versions on {machine}"
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            found[key] = Version(specifier.version)
    return found


@pytest.mark.parametrize("name", [*supply.SHIPPED, "fetched", "gpu-pack", "vllm"])
def test_a_lock_pins_what_is_declared_on_every_python(name: str) -> None:
    for machine in MACHINES:
        pinned = pins(name, machine)
        for requirement in map(Requirement, supply.wanted(name)):
            if requirement.marker is None or requirement.marker.evaluate(machine):
                version = pinned.get(canonicalize_name(requirement.name))
                problem = (
                    f"requirements/{name}.lock: {requirement} is declared, {version} is pinned: make lock"
                )
                assert version is not None and requirement.specifier.contains(version), problem


def test_a_file_whose_hash_is_not_in_the_lock_is_refused(tmp_path, monkeypatch):
    steps = provision.Steps(tmp_path / "steps.log")
    locked.installer()
    wheel = tmp_path / "locked_thing-1.0-py3-none-any.whl"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("locked_thing.py", "")
        archive.writestr(
            "locked_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: locked-thing\nVersion: 1.0\n"
        )
        archive.writestr("locked_thing-1.0.dist-info/WHEEL", kind)
        archive.writestr("locked_thing-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(provision, "pause", lambda _: None)
    with pytest.raises(provision.StepFailed, match="Hash mismatch"):
        locked.install(steps, f"locked-thing==1.0 --hash=sha256:{'0' * 64}\n", target=tmp_path / "other")
    assert not list(tmp_path.glob("other/*.py"))
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    locked.install(steps, f"locked-thing==1.0 --hash=sha256:{right}\n", target=tmp_path / "right")
    assert (tmp_path / "right" / "locked_thing.py").exists()
