"""`make demo`: the main job on real input, in two acts, and a table of the results.

Act 1 needs only the clone's `.venv`: a server on embedded defaults, several client processes that store and retrieve KV
of a Llama-8B shape, SIGKILL, restart; every retrieved byte is compared.
Act 2 is real vLLM on the CPU with a small random-weight Llama, the engine in a process of its own.
With `CLUSTER=1` a controller, two servers and two vLLM processes take their place, the second of which hits chunks that
the first one computed; `KEEP=1` leaves all of it running, dashboard included, until Ctrl-C.  With `GATEWAY=1` a gateway
stands before two vLLM processes with a server each, one of which is killed.  With `PD=1` one of two vLLM processes
computes prompts for the other, and is killed.  With `FLEET=1` all of it is shown with simulated engines.

All state lies in a fresh folder under `build/`, the sockets under /tmp and the pool under /dev/shm, all named after
this process; they are removed at the end, also after Ctrl-C.  If the demo was killed, the next start removes them.  The
exit status is 0 when every row that ran is right, 1 when bytes or tokens differ or a hit is missing, 2 when something
did not start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

from tests.harness import vllm_env, vllm_model
from tests.harness.child import ChildEnded, ChildError
from tests.harness.daemon import Unavailable
from tests.harness.own_process import ServerFailed
from tests.harness.server_process import sweep
from tests.harness.vllm_run import VllmFailed
from tests.tools.demo.act_clients import act_1
from tests.tools.demo.act_cluster import act_4
from tests.tools.demo.act_fleet import act_7
from tests.tools.demo.act_gateway import act_5
from tests.tools.demo.act_pd import act_6
from tests.tools.demo.act_vllm import CASES_2, act_2
from tests.tools.demo.common import MODEL, Table, Wrong, say

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "build" / "demo.json"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def vllm_wanted(answer: str) -> str:
    """Why act 2 is not run; empty if it is run. Prepares vLLM's environment if that is small or asked for."""
    if answer == "0":
        return "VLLM=0"
    if answer == "1":
        os.environ["VLLM"] = "1"
    try:
        if vllm_env.find() is None:
            size = vllm_env.download_size().download_bytes
            if size > vllm_env.SMALL_BYTES and answer != "1":
                return f"real vLLM would be a download of {size / 1e9:.1f} GB; to run it: make demo VLLM=1"
            say(f"Act 2 needs real vLLM: a download of {size / 1e9:.1f} GB, once")
            vllm_env.ensure()
    except Unavailable as reason:
        return str(reason)
    return ""


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    """Makes a folder under build/ and removes it at the end; first removes what killed demos have left."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    sweep()
    for left in build.glob("demo-*"):
        owner = re.fullmatch(r"demo-(\d+)-.*", left.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"demo-{os.getpid()}-", dir=build))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_result(table: Table) -> None:
    """Writes build/demo.json and renames it into place, so that two demos at once leave a whole file."""
    fd, name = tempfile.mkstemp(dir=RESULT.parent, prefix=".demo-")
    with os.fdopen(fd, "w") as file:
        json.dump({"rows": table.rows, "ok": table.ok}, file, indent=2)
    os.chmod(name, 0o644)
    os.replace(name, RESULT)


def stop_on_signal(number: int, frame: Any) -> None:
    for again in STOP_SIGNALS:
        signal.signal(again, signal.SIG_IGN)  # the clean-up is not interrupted
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.demo",
        description="the main job on real input; see the top of tests/tools/demo/__main__.py",
    )
    wish = os.environ.get("VLLM", "")
    parser.add_argument("--vllm", default=wish, choices=("", "0", "1"))
    cluster = os.environ.get("CLUSTER", "") not in ("", "0")
    parser.add_argument("--cluster", action="store_true", default=cluster,
                        help="only that: a controller and two instances that read from each other")  # fmt: skip
    gateway = os.environ.get("GATEWAY", "") not in ("", "0")
    parser.add_argument("--gateway", action="store_true", default=gateway,
                        help="only that: a gateway before two engines, one of which is killed")  # fmt: skip
    pd = os.environ.get("PD", "") not in ("", "0")
    parser.add_argument("--pd", action="store_true", default=pd,
                        help="only that: an engine that computes prompts for another one")  # fmt: skip
    fleet = os.environ.get("FLEET", "") not in ("", "0")
    parser.add_argument("--fleet", action="store_true", default=fleet,
                        help="only that: simulated engines at two servers, a gateway and a controller")  # fmt: skip
    keep = os.environ.get("KEEP", "") not in ("", "0")
    parser.add_argument("--keep", action="store_true", default=keep,
                        help="with --cluster: leave it running until Ctrl-C")  # fmt: skip
    parser.add_argument("--act", type=int, choices=(1, 2), help="only this act")
    # Latents have no prefix cache of vLLM's own to compare with.
    models = (*vllm_model.SIZES, *(name for name in vllm_model.FAMILIES if name != "deepseek-v3"))
    parser.add_argument("--model", default=os.environ.get("MODEL") or MODEL, choices=models, help="of act 2")
    arguments = parser.parse_args()
    for number in STOP_SIGNALS:
        signal.signal(number, stop_on_signal)
    table = Table()
    status = 0
    begun_s = time.monotonic()
    with fresh_folder() as folder:
        try:
            if arguments.fleet:
                act_7(folder, table)
                table.print(7)
            elif arguments.gateway or arguments.pd:
                if reason := vllm_wanted(arguments.vllm or "1"):
                    raise Unavailable(reason)
                (act_6 if arguments.pd else act_5)(folder, table, arguments.model)
                table.print(6 if arguments.pd else 5)
            elif arguments.cluster:
                reason = vllm_wanted(arguments.vllm)
                if reason:
                    say(f"Without vLLM: {reason}")
                act_4(folder, table, arguments.model, with_vllm=not reason, keep=arguments.keep)
                table.print(4)
            elif arguments.act != 2:
                act_1(folder, table)
                table.print(1)
                say(f"  Act 1 took {time.monotonic() - begun_s:.0f} s")
            special = arguments.cluster or arguments.gateway or arguments.pd or arguments.fleet
            if arguments.act != 1 and not special:
                reason = vllm_wanted(arguments.vllm)
                if reason:
                    say(f"Act 2 is not run: {reason}")
                    for case in CASES_2:
                        table.add(case, 2, run=False)
                else:
                    act_2(folder, table, arguments.model)
                table.print(2)
        except KeyboardInterrupt:
            say("interrupted; everything is removed")
            return 130
        except Wrong as wrong:
            say(f"WRONG: {wrong}")
            status = 1
        except (ServerFailed, VllmFailed, ChildEnded, ChildError, Unavailable, URLError) as error:
            say(f"FAILED: {error}")
            status = 2
    if not table.ok:
        for row in table.rows:
            if not row["ok"]:
                say(f"WRONG: {row['case']}: {json.dumps(row)}")
        status = status or 1
    if status:
        table.rows.append({"case": "the demo itself", "run": True, "ok": False})
    write_result(table)
    say(f"{'all right' if not status else 'NOT all right'}; {RESULT.relative_to(ROOT)} has the rows")
    return status


if __name__ == "__main__":
    sys.exit(main())
