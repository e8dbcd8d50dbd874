"""Client processes for the tests to kill: started by a fork server that has everything imported, a few ms each.

A role is a function ``role(link, *arguments)`` of a test module; it runs in a process of its own and talks through its
`Connection`.  An exception in it travels back and is raised by `Worker.expect`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kvkeep.ipc.client", "kvkeep.ipc.attach", "tests.faults.oracle", "tests.faults.raw"])

PATIENCE_S = 60.0


def shared_counters(count: int) -> Any:
    """Numbers that workers write and the test reads: one writer each."""
    return _context.Array("Q", count, lock=False)


class WorkerFailed(AssertionError):
    pass


def _main(link: Connection, role: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        role(link, *arguments)
    except (BrokenPipeError, EOFError):
        pass
    except BaseException:
        link.send(("failed", traceback.format_exc()))


class Worker:
    def __init__(self, role: Callable[..., None], *arguments: Any) -> None:
        self.link, theirs = _context.Pipe()
        self.process = _context.Process(target=_main, args=(theirs, role, arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def expect(self, timeout_s: float = PATIENCE_S) -> Any:
        """The next thing the worker says."""
        if not self.link.poll(timeout_s):
            raise WorkerFailed(f"worker {self.pid} said nothing for {timeout_s} s")
        try:
            said = self.link.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            raise WorkerFailed(f"worker {self.pid} died with exit code {self.process.exitcode}") from None
        if isinstance(said, tuple) and said and said[0] == "failed":
            raise WorkerFailed(said[1])
        return said

    def tell(self, what: Any) -> None:
        try:
            self.link.send(what)
        except BrokenPipeError:
            self.expect()  # says why it ended
            raise

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> int:
        """Kill it if it still runs; its exit code."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.link.close()
        return self.process.exitcode or 0


def eventually(what: Callable[[], Any], timeout_s: float = 10.0, *, say: Callable[[], Any] | str = "") -> float:
    """Wait until ``what()`` is true; how long that took."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {say() if callable(say) else say or what}")
        time.sleep(0.01)
    return time.monotonic() - began
