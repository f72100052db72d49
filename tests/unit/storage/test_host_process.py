"""One child process of an adapter host: what it printed last is kept for the error of its SDK."""

from __future__ import annotations

import os

from kvstrata.storage.host.process import LAST_LINES, HostProcess


async def test_the_last_lines_of_the_output_are_kept_without_credentials() -> None:
    process = HostProcess("mooncake_store-0", -1, (), lambda how: None)
    assert process.last_lines() == ""
    os.write(process._output_writer, b"".join(b"E1128 line %d\n" % number for number in range(9)))
    os.write(process._output_writer, b"connect redis://user:hunter2@h failed, password=hunter2\n")
    assert process.last_lines().count(" | ") == LAST_LINES - 1
    assert "line 8" in process.last_lines() and "hunter2" not in process.last_lines()
    os.close(process._output_writer)
    process._tell("exit status 3")
    assert "line 8" in process.last_lines(), "the descriptor is closed by now"
