"""Several simulated engines, each in a process of its own, which all do the same step at the same time."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from kvstrata.errors import InternalError, KvstrataError, Unavailable
from kvstrata.measure.engine import SETTLE_S, WAIT_S, Plan, Silent, SimulatedEngine


def serve(connection: Connection, plan: Plan, number: int) -> None:
    """Main function of a client process: do the steps that the parent names, until the connection closes.

    A step is a method of SimulatedEngine. Each answer is (True, what it returned) or (False, the error).
    """
    logging.basicConfig(level=logging.CRITICAL)  # errors are sent to the parent
    engine: SimulatedEngine | None = None
    try:
        engine = SimulatedEngine(plan, number)
        connection.send((True, None))
        while True:
            name, arguments = connection.recv()
            try:
                answer = (True, getattr(engine, name)(*arguments))
            except Silent as error:
                answer = (False, error)
            connection.send(answer)
    except (EOFError, ConnectionError):
        pass  # the parent has finished or died
    except KvstrataError as error:
        with contextlib.suppress(ConnectionError):
            connection.send((False, error))
    finally:
        if engine is not None:
            engine.close()


class Team:
    """The client processes. They ignore SIGINT from the terminal, so that only `close` ends them."""

    def __init__(self, plan: Plan, processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        resource_tracker.ensure_running()  # if it started later, it would unblock SIGINT
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(processes):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=serve, args=(theirs, plan, number), daemon=True)
                process.start()
                theirs.close()
                self._processes.append((process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def started(self) -> None:
        """Wait until all processes have made their engines. Raises as `all`."""
        self._answers(self._processes)

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Let all processes do the step `name` at the same time; return their answers, in the order of the processes.

        Raises the error of a process, Unavailable if one does not answer, InternalError if one has ended. After Silent
        all of them can do further steps; after any other error the team can only be closed.
        """
        return self._ask(self._processes, name, arguments)

    def first(self, name: str, *arguments: Any) -> Any:
        """Let only the first process do the step `name`; return its answer. Raises as `all`."""
        return self._ask(self._processes[:1], name, arguments)[0]

    def close(self) -> None:
        """End all processes, by force if they do not end by themselves."""
        for _, connection in self._processes:
            connection.close()
        for process, _ in self._processes:
            process.join(SETTLE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _ask(self, processes: Sequence[Any], name: str, arguments: tuple[Any, ...]) -> list[Any]:
        for process, connection in processes:
            try:
                connection.send((name, arguments))
            except ConnectionError:
                raise self._ended(process) from None
        return self._answers(processes)

    def _answers(self, processes: Sequence[Any]) -> list[Any]:
        answers = []
        silent: Silent | None = None
        for process, connection in processes:
            if not connection.poll(3 * WAIT_S):
                raise Unavailable(f"client process {process.pid} sent no answer within {3 * WAIT_S:.0f} s")
            try:
                fine, answer = connection.recv()
            except (EOFError, ConnectionError):
                raise self._ended(process) from None
            if isinstance(answer, Silent):
                silent = answer
            elif not fine:
                raise answer
            answers.append(answer)
        if silent is not None:
            raise silent
        return answers

    def _ended(self, process: Any) -> KvstrataError:
        process.join(1)
        return InternalError(
            f"client process {process.pid} ended unexpectedly, with exit status {process.exitcode}"
        )
