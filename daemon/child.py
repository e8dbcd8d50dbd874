"""The first module of every child process: ``python -m kvkeep.daemon.child PARENT HEARTBEAT_FD MODULE ARGS...``

It ties the child's life to its parent's before anything else runs, so that a killed daemon leaves no process behind,
and then calls ``MODULE.main(ARGS, beat)``.  ``beat`` is to be called from the child's main loop: a child that no
longer comes round is killed and started again (see supervise).

The death signal is set here and not between fork and exec in the parent: no Python code runs in a half-made process,
and the parent can use vfork.  What is lost in between is caught by comparing the parent's pid.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What ps and top show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def heart(fd: int) -> Callable[[], None]:
    """The function that tells the parent that this child's loop still turns."""

    def beat() -> None:
        if fd >= 0:
            try:
                os.write(fd, b".")
            except BlockingIOError:  # the parent is slow; it has beats enough to read
                pass

    return beat


def main() -> int:
    parent, fd, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the daemon, which then stops us
    if not module.startswith("kvkeep."):
        raise SystemExit(f"{module} is not a module of kvkeep")
    name_process("kvkeep-" + module.rpartition(".")[2])
    return int(importlib.import_module(module).main(sys.argv[4:], heart(fd)))


if __name__ == "__main__":
    sys.exit(main())
