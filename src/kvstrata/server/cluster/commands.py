"""The commands of one controller: each is carried out once, and its result is sent until the controller has it.

Nothing here waits for the controller.  What each kind of command does: actions.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvstrata.errors import KvstrataError
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.cluster_wire import MAX_COMMANDS, Command, CommandResult, encode
from kvstrata.rpc.command_wire import ResyncArgument, argument_of
from kvstrata.server.cluster.actions import Actions

MAX_DONE = 1_024


class CommandTable:
    """The commands of one controller and their results. Belongs to the event loop."""

    def __init__(
        self, actions: Actions, resync: Callable[[int], Awaitable[None]], ended: Callable[[], None]
    ) -> None:
        """`resync(freeze_ms)` returns when a full sync has ended; `ended` is called when a result is ready to send."""
        self._actions = actions
        self._resync = resync
        self._ended = ended
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: OrderedDict[int, CommandResult] = OrderedDict()
        self._unacknowledged: OrderedDict[int, CommandResult] = OrderedDict()
        self._log = EventLog("cluster")

    def __len__(self) -> int:
        return len(self._running) + len(self._unacknowledged)

    def take(self, command: Command) -> None:
        """Begin a command unless its number is known. If its result was acknowledged before, send the result again.

        While MAX_COMMANDS commands run or wait for the acknowledgement, the command is ignored: the controller sends
        it again.
        """
        number = command.number
        if number in self._running or number in self._unacknowledged:
            return
        if number in self._done:
            self._unacknowledged[number] = self._done[number]
            self._ended()
        elif len(self._running) + len(self._unacknowledged) < MAX_COMMANDS:
            self._running[number] = asyncio.create_task(
                self._carry_out(command), name=f"command-{command.kind}"
            )

    def refuse(self, command: Command, why: str) -> None:
        """Answer a command with an error instead of carrying it out."""
        self._unacknowledged[command.number] = CommandResult(command.number, False, why)
        self._ended()

    def results(self) -> list[CommandResult]:
        """Results that the controller has not acknowledged."""
        return list(self._unacknowledged.values())[:MAX_COMMANDS]

    def acknowledged(self, results: Sequence[CommandResult]) -> None:
        """Send these results no more: the controller has them."""
        for result in results:
            self._unacknowledged.pop(result.number, None)

    async def stop(self) -> None:
        """Cancel the running commands, and wait until they have ended."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, command: Command) -> None:
        result = CommandResult(
            command.number, False, "the instance failed to carry out the command; see its log"
        )
        try:
            done = CommandResult(command.number, True, "", await self._do(command))
            encode(done)  # a result that cannot be encoded would end the task that sends heartbeats
            result = done
        except KvstrataError as error:
            result = CommandResult(command.number, False, error.message[:2000])
        except asyncio.CancelledError:
            result = CommandResult(command.number, False, "the instance is stopping")
            raise
        except Exception as error:
            # A boundary like the one of requests: our own mistake in one command is answered and logged.
            self._log.error("command_failed", kind=str(command.kind), error=repr(error))
        finally:
            del self._running[command.number]
            self._unacknowledged[command.number] = self._done[command.number] = result
            while len(self._done) > MAX_DONE:
                self._done.popitem(last=False)
            if result.ok:
                self._log.debug("command", kind=str(command.kind))
            else:
                kind = str(command.kind)
                self._log.repeated(
                    logging.WARNING,
                    f"command {kind}",
                    "command_refused",
                    command=kind,
                    message=result.message,
                )
            self._ended()

    async def _do(self, command: Command) -> dict[str, Any]:
        argument = argument_of(command)
        if isinstance(argument, ResyncArgument):
            await self._resync(argument.freeze_ms)
            return {}
        return await self._actions.do(argument)
