"""Blocks of the pages are followed literally: commands are run, and their output compared with what a page shows."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.harness import envoy_program, network
from tests.harness.cache_engine import eventually
from tests.harness.child import ChildError
from tests.harness.namespaces import CONTAINER, hidden_shm, why_not
from tests.unit.repository.test_pages import BLOCK, ROOT, four_hosts, lines_of_block, make_secrets

pytestmark = [pytest.mark.integration, pytest.mark.long]

EXAMPLE = ROOT / "examples" / "external_python_adapter"


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block of a page."""
    return [(found["language"], found["text"]) for found in BLOCK.finditer((ROOT / page).read_text())]


def block(page: str, begins: str) -> str:
    return next(text for _, text in blocks(page) if text.startswith(begins))


def commands(page: str, begins: str) -> list[str]:
    console = block(page, begins).lstrip().startswith("$ ")
    return [line.strip() for line in lines_of_block(block(page, begins), console) if line.strip()]


def output(page: str, begins: str, command: str) -> list[str]:
    """The lines that a console block shows after a command."""
    after = block(page, begins).partition(f"$ {command}")[2].split("\n", 1)[1]
    return [line for line in after.partition("\n$ ")[0].splitlines() if line.strip()]


def session(folder: Path, *lines: str, **variables: str) -> dict[str, str]:
    """What these commands print in a container where HOME, the ports and /dev/shm are theirs alone."""
    if reason := why_not():
        pytest.skip(reason)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("KVSTRATA_", "XDG_"))},
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "200",
        **variables,
    }
    script = [sys.executable, str(Path(__file__).with_name("page_session.py")), *lines]
    done = subprocess.run(
        [*CONTAINER, *hidden_shm("2g"), *script], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def shape(line: str) -> str:
    """A line without what differs from run to run: numbers, units, paths, and the width of columns."""
    line = re.sub(r"^\S*(…|\d{4}-\d\d-\d\dT\S+) (?=[A-Z]+ kvstrata)", "", line.strip())
    line = re.sub(r"(?<![\w.])/[\w./-]+", "PATH", line)
    line = re.sub(r"\d[\d.,]*(e[+-]\d+)?( ?(MiB|GiB|GB|MB|KiB|bytes|ms|µs|s)\b)?", "N", line)
    return re.sub(r"\s+", " ", line)


def assert_shown(shown: list[str], printed: str) -> None:
    """Each line of a page stands in the output, in this order; `…` on the page stands for anything."""
    lines = iter(shape(line) for line in printed.splitlines())
    for wanted in shown:
        pattern = ".*".join(re.escape(part.strip()) for part in shape(wanted).split("…"))
        assert any(re.search(f"^{pattern}", line) for line in lines), f"not printed: {wanted}\n{printed}"


def test_getting_started(tmp_path: Path) -> None:
    page = "docs/getting-started.md"
    start, bench, look = "$ lmcache-server", "$ kvstrata bench", "$ kvstrata ctl status"
    kill = re.sub(r" \d+$", " PID", commands(page, "$ kill")[0])
    l2_list = "kvstrata ctl l2 list"
    assert commands(page, "$ python3")[-1] == "kvstrata doctor"
    printed = session(
        tmp_path,
        *commands(page, "$ python3")[-1:],
        *commands(page, start),
        *commands(page, bench),
        kill,
        *commands(page, look),
        KVSTRATA_L1_SIZE_GB="1",
    )
    log = printed["lmcache-server"]
    assert_shown(output(page, start, "lmcache-server"), log)
    assert_shown(block(page, "… ERROR kvstrata.keeper").splitlines(), log)
    assert_shown(output(page, bench, "kvstrata bench"), printed["kvstrata bench"])
    assert_shown(output(page, look, l2_list), printed[l2_list])
    assert "disk-0" in printed["kvstrata ctl status"]
    names = [line.split()[1] for line in output(page, "$ python3", "kvstrata doctor")[:10]]
    told = [line.split()[1] for line in printed["kvstrata doctor"].splitlines()[: len(names) + 1] if line]
    assert {*names} <= {*told}, told  # what it says of each depends on the machine


def test_the_server_of_the_readme_accepts_its_flags(tmp_path: Path) -> None:
    """Its 20 GB are not taken here; test_package runs `pip install`."""
    install, server, _ = commands("README.md", "pip install .")
    assert install == "pip install ."
    printed = session(tmp_path, f"{server} --check")
    assert "these settings can be used" in printed[f"{server} --check"]


def test_a_tier_is_measured(tmp_path: Path) -> None:
    """The tier is in another folder, and fewer and smaller records are measured than the page shows."""
    page, begins = "docs/measuring.md", "$ kvstrata bench l2"
    [command] = commands(page, begins)
    small = command.replace("/mnt/nvme/kv", str(tmp_path / "kv")) + " --chunk-mb 1 --count 2 --rounds 1"
    printed = session(tmp_path, small)[small]
    whole = output(page, begins, command)
    assert_shown([line for line in whole if not re.search(r"^(machine|4|32) ", line)], printed)


def test_the_contract_suite_runs_as_the_page_says(tmp_path: Path) -> None:
    """The page leaves out the methods of the medium, and the adapter itself: those of the example stand in for them."""
    text = block("docs/writing-an-adapter.md", "from kvstrata.testing")
    source = (EXAMPLE / "tests" / "test_contract.py").read_text()
    [medium] = [
        one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "Database"
    ]
    methods = "".join(f"    {line}\n" for one in medium.body[1:] for line in ast.unparse(one).splitlines())
    block_with_methods = text.replace("    ...\n", methods)
    (tmp_path / "test_mine.py").write_text(
        "from __future__ import annotations\nimport sqlite3\nfrom pathlib import Path\nfrom typing import Any\n"
        f"from kvstrata_sqlite import GB, SqliteAdapter\n{block_with_methods}\n"
        "def MyAdapter(path, capacity_bytes):\n    return SqliteAdapter(str(path), capacity_bytes / GB)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "-k", "stored",
         "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{EXAMPLE / 'src'}"},
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def test_a_cluster_on_loopback(tmp_path: Path) -> None:
    lines = ["lmcache-controller", "lmcache-server --controller-url tcp://localhost:8400"]
    page = (ROOT / "docs/cluster.md").read_text()
    assert all(f"`{line}`" in page for line in lines)
    [link] = commands("docs/operations.md", "$ kvstrata ctl cluster dashboard-link")
    printed = session(tmp_path, *lines, link, KVSTRATA_L1_SIZE_GB="0.1")
    [shown] = output("docs/operations.md", f"$ {link}", link)
    code = re.compile(r"[\w-]+(\.\.\.)?$")
    assert code.sub("CODE", printed[link].strip()) == code.sub("CODE", shown)
    assert "controller.member" not in printed[lines[1]] and " member " in printed[lines[1]]


def test_pools_are_listed_and_freed(tmp_path: Path) -> None:
    page, list_ = "docs/operations.md", "kvstrata ctl pool list"
    free = commands(page, f"$ {list_}")[1]

    def here(command: str) -> str:
        """The command with the pool of root, who runs it in the container."""
        return command.replace("/kvstrata-1000-", "/kvstrata-0-")

    printed = session(
        tmp_path,
        "timeout --signal INT 10 env KVSTRATA_L1_SIZE_GB=0.1 lmcache-server 2>/dev/null",
        list_,
        here(free),
    )
    header, *_ = output(page, f"$ {list_}", list_)
    assert_shown([header], printed[list_])
    assert "/dev/shm/kvstrata-0-5555" in printed[list_]
    assert_shown(output(page, f"$ {list_}", free), printed[here(free)])


def test_the_fleet_of_the_page_finds_the_prompt_that_its_requests_share() -> None:
    text = block("docs/measuring.md", "from kvstrata.testing")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout.startswith(f"[0, {', '.join(['1488'] * 39)}] "), done.stderr


@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "-")
def test_the_commands_for_four_hosts_make_a_cluster(tmp_path: Path) -> None:
    """Hosts are namespaces of one machine, so folders and the names of hosts are given; the page leaves them out."""
    told, settings = four_hosts()

    def here(text: str) -> str:
        return text.replace("10.0.0.", f"{network.NET}.")

    make_secrets(tmp_path)
    made = [sys.executable, "-m", "kvstrata", *told["kvstrata cluster init"]]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    (tmp_path / "gateway.yaml").write_text(here(settings))
    with (
        network.Network(tmp_path, 3) as hosts,
        tempfile.TemporaryDirectory(prefix="kv-") as short,  # paths of sockets
        contextlib.ExitStack() as stack,
    ):

        def start(host: network.Host, command: str, name: str, *more: str) -> None:
            folder = Path(short) / name
            folder.mkdir()
            (folder / "shm").mkdir(mode=0o700)
            module = ["-m", f"kvstrata.cli.{command.removeprefix('lmcache-')}", "--no-supervise"]
            words = [here(word).replace("10.73.0.2:", f"{host.address}:") for word in told[command]]
            environment = {
                **os.environ,
                **dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME"), str(folder)),
                "KVSTRATA_L1_SEGMENT_DIR": str(folder / "shm"),
            }
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [*host.under, sys.executable, *module, *words, *more],
                    cwd=tmp_path, env=environment, stdout=log, stderr=log,
                )  # fmt: skip
            stack.callback(lambda: print((folder / "log").read_text()))
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)

        start(hosts.hub, "lmcache-controller", "controller")
        for host, name in zip(hosts.hosts, ("host-a", "host-b", "host-c"), strict=True):
            more = ("--instance-id", f"{name}-5555", "--l1-size-gb", "0.06", "--l2-adapter", "none")
            start(host, "lmcache-server", name, *more, "--cluster-curve-file", f"keys/{name}.keys")
        start(hosts.hub, "lmcache-gateway", "gateway", "--envoy", str(envoy_program.program()))

        def document(path: str) -> Any:
            token = (tmp_path / "http.token").read_text()
            with contextlib.suppress(ChildError):
                return json.loads(hosts.hub.http(f"http://{network.NET}.1:9000{path}", token=token))
            return {}

        def members() -> set[str]:
            rows = document("/v1/instances").get("instances", [])
            return {row["id"] for row in rows if row["state"] == "live" and row["confirmed"]}

        eventually("all servers are members", lambda: len(members()) == 3)
        eventually("the gateway asks the controller", lambda: document("/v1/cluster").get("gateways"))
        logs = "".join((Path(short) / name / "log").read_text() for name in ("controller", "gateway"))
        assert logs.count("port_without_tls") == 2
