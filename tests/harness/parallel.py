"""How pytest-xdist gives the tests to its workers: a file at a time, in their order, and at last what needs the machine
for itself.

Fixtures of a module are made once that way, and a test that waits leaves the processor to the other worker.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ALONE = "vllm"
"""Name of the folder whose tests run while no other test does, in one worker."""


class ByFile(LoadScopeScheduling):
    """See the module.  When nothing else is left, all workers but one are ended; that one gets the tests of ALONE once
    the others' last tests are over.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return ALONE if ALONE in PurePosixPath(file).parts else file

    def _only_alone_is_left(self) -> bool:
        return list(self.workqueue) == [ALONE]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if ALONE in self.workqueue:
            self.workqueue.move_to_end(ALONE)
        others = [work for other, work in self.assigned_work.items() if other is not node]
        if not self.workqueue or (self._only_alone_is_left() and any(map(self._pending_of, others))):
            return
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        runs_on = sum(not other.shutting_down for other in self.nodes)
        if self._only_alone_is_left() and not node.shutting_down and runs_on > 1:
            # A worker runs its last test only when it knows the next one, or that there is none.
            if self._pending_of(self.assigned_work[node]) <= 1:
                node.shutdown()
        else:
            super()._reschedule(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """The last worker may have waited for it."""
        super().mark_test_complete(node, item_index, duration)
        if self._only_alone_is_left():
            for other in self.nodes:
                self._reschedule(other)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """For `pytest -n`."""
    config.option.loadscopereorder = False
    return ByFile(config, log)
