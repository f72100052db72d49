"""What a clone, an sdist and a wheel need, have, and do where nothing else is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.harness.server_process import ServerProcess
from tests.tools import provision
from tests.tools.provision import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.long]


PAGES = "src/kvstrata/controller/dashboard/**/*"
BUILT_HERE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.o", "*.a", "fuzz-artifacts"
)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist of this tree, and the wheel of the unpacked sdist.

    The build takes all objects from the cache that `make setup` filled, since its sources and flags are the same.
    """
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "tree", ignore=BUILT_HERE)
    build(folder, "--sdist", "tree")
    [sdist] = (folder / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    build(folder, "--wheel", str(unpacked))
    [wheel] = (folder / "dist").glob("*.whl")
    return {"tree": folder / "tree", "sdist": sdist, "wheel": wheel}


def build(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), *arguments]
    environment = {**os.environ, "KVSTRATA_CUDA": "off"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    compiled = re.findall(r"^(?:compiling|translating) .*$", done.stdout, re.MULTILINE)
    assert compiled == [], "the cache lacks objects of this tree: run `make setup` first"


def files_of(tree: Path, *patterns: str) -> set[str]:
    found = {path for pattern in patterns for path in tree.glob(pattern) if path.is_file()}
    made = {"build", "__pycache__"}
    return {str(path.relative_to(tree)) for path in found if made.isdisjoint(path.relative_to(tree).parts)}


def test_sdist_holds_every_source_and_nothing_that_was_built(artifacts: dict[str, Path]) -> None:
    with tarfile.open(artifacts["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = files_of(artifacts["tree"], "ext/**/*", "src/kvstrata/**/*.py", PAGES)
    assert len(wanted) > 100
    wanted |= {"src/kvstrata/py.typed", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    assert wanted - names == set()
    assert [name for name in names if re.search(r"\.(so|o|a|pyc|pyi)$|__pycache__", name)] == []


def test_wheel_holds_the_package_its_compiled_modules_and_whole_headers_only(artifacts):
    with zipfile.ZipFile(artifacts["wheel"]) as archive:
        names = set(archive.namelist())
        headers = {name for name in names if name.startswith("kvstrata/include/")}
        texts = {name: archive.read(name).decode() for name in headers}
    for name, text in texts.items():
        assert (
            text
            == (artifacts["tree"] / "ext/core/include" / name.removeprefix("kvstrata/include/")).read_text()
        )
        included = re.findall(r'^#include "(.*)"$', text, re.MULTILINE)
        assert {f"kvstrata/include/{other}" for other in included} <= headers, name
    modules = files_of(artifacts["tree"] / "src", "kvstrata/**/*.py")
    pages = files_of(artifacts["tree"], PAGES)
    assert len(pages) > 10
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    sources = [
        path for folder in ("cython", "cuda") for path in (artifacts["tree"] / "ext" / folder).glob("*.pyx")
    ]
    native = {f"kvstrata/native/{path.stem}{end}" for path in sources for end in (suffix, ".pyi")}
    assert {name for name in names if not re.match(r"[^/]+\.dist-info/", name)} == {
        *modules,
        *native,
        *headers,
        *(page.removeprefix("src/") for page in pages),
        "kvstrata/py.typed",
        "kvstrata/gateway/envoy/gateway.yaml",
        "kvstrata/gateway/envoy/watch.lua",
        "kvstrata/gateway/envoy/libkv_watch.so",  # Envoy loads it, Python never
    }


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that these requirements need, all the way down, as installed here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        extras = ["", *requirement.extras]
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if requirement.name in found:
            continue
        found.add(requirement.name)
        for text in metadata.requires(requirement.name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                waiting.append(needed)
    return found


@pytest.fixture(scope="module")
def installed(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel and its declared dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(artifacts["wheel"])], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(artifacts["wheel"]) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        declared = re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    for distribution in closure(declared):
        files = metadata.distribution(distribution)
        for top in {
            path.parts[0] for path in files.files or () if path.parts[0] not in ("..", "__pycache__")
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(files.locate_file(top))))
    return folder / "bin"


def run(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, with `environment` or as a user who has nothing else installed."""
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        command, cwd=folder, env=environment or bare, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=1_700, check=False,
    )  # fmt: skip


def test_every_module_but_the_connector_imports_without_torch(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, sys
import kvstrata
assert not kvstrata.__file__.startswith(sys.argv[1]), kvstrata.__file__
done = []
for found in pkgutil.walk_packages(kvstrata.__path__, "kvstrata."):
    others = ("kvstrata.connectors", "kvstrata.testing", "kvstrata.__main__", "kvstrata.gateway.envoy.libkv_watch")
    others += ("kvstrata.gateway.picker",)
    if not found.name.startswith(others):
        importlib.import_module(found.name)
        done.append(found.name)
print(len(done), *sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "vllm", "cupy")))
"""
    ran = run([str(installed / "python"), "-c", code, str(ROOT)], tmp_path)
    assert ran.returncode == 0, ran.stderr
    count, *heavy = ran.stdout.split()
    assert int(count) > 50 and heavy == []


def test_check_and_doctor_work(installed: Path, tmp_path: Path) -> None:
    check = run([str(installed / "lmcache-server"), "--check"], tmp_path)
    assert check.returncode == 0, check.stderr
    doctor = run([str(installed / "kvstrata"), "doctor"], tmp_path)
    assert "Traceback" not in doctor.stdout + doctor.stderr
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr


def test_server_starts_is_ready_and_ends_in_order(installed: Path, tmp_path: Path) -> None:
    with ServerProcess(
        tmp_path, l1_mb=64, l2="fs", python=installed / "python", environment={"PATH": "/usr/bin:/bin"}
    ) as server:
        server.start()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.ready['http_port']}/readyz", timeout=60
        ) as reply:
            assert reply.status == 200
        assert server.stop() == 0, server.log_tail()
        assert "Traceback" not in server.log.read_text()


def test_files_of_an_earlier_commit_are_not_shipped(tmp_path: Path) -> None:
    gone, newer = tmp_path / "kvstrata/service/server.py", tmp_path / "kvstrata/errors.py"
    gone.parent.mkdir(parents=True)
    for path in (gone, newer):
        path.write_text("raise ImportError('of an earlier commit')\n")
        os.utime(path, (4_000_000_000, 4_000_000_000))
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert not gone.exists()
    assert newer.read_text() == (ROOT / "src/kvstrata/errors.py").read_text()


NAMED = ("git", "make", "g++", "gcc", "cpp", "as", "ld", "ar", "nm", "ranlib", "strip")
"""A compiler brings its preprocessor, assembler and linker."""
KEPT = ("PIP_", "UV_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
"""Variables that say how this machine reaches its registry."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has the programs of every Debian system and those that README.md names."""
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg-query tells which programs every system has; this is no Debian")
    every = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Priority} ${Package}\n"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    packages = [line.split()[1] for line in every.splitlines() if line.startswith("required ")]
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True).stdout
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = [path for line in listed.splitlines() if (path := Path(line)).parent.name in ("bin", "sbin")]
    programs += [
        Path(found) for name in (*NAMED, "awk") if (found := shutil.which(name, path="/usr/bin:/bin"))
    ]
    for program in programs:
        if not (folder / program.name).exists() and os.access(program, os.X_OK):
            (folder / program.name).symlink_to(program)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / version).symlink_to(Path(sys._base_executable).resolve())
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    home = tmp_path / "home"
    home.mkdir()
    return {**kept, "PATH": str(folder), "HOME": str(home), "KVSTRATA_CACHE": str(provision.cache_root())}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            target = tmp_path / "clone" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return tmp_path / "clone"


@pytest.mark.timeout(1800)
def test_a_clone_is_set_up_and_a_cpp_test_runs_with_what_the_readme_names(clone, bare):
    assert "`g++`, git, make" in (ROOT / "README.md").read_text()
    check = ["make", "-C", "ext/core", "check", "SANITIZER=address", "TEST=hash/sha256_test"]
    for command in (["make", "setup"], [str(clone / ".venv/bin/kvstrata"), "doctor", "--help"], check):
        done = run(command, clone, bare)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
