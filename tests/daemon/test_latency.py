"""The control process asks for short slices, and changes nothing else."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from kvkeep.daemon.latency import _ATTR, _SCHED_SETATTR, SLICE_NS

pytestmark = pytest.mark.skipif(platform.machine() not in _SCHED_SETATTR, reason="system call number not known")


def attributes(pid: int) -> tuple[int, ...]:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_ATTR.size)
    assert libc.syscall(_SCHED_SETATTR[platform.machine()] + 1, pid, buffer, _ATTR.size, 0) == 0
    return _ATTR.unpack(buffer.raw)


def in_a_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_the_slice_is_short_and_the_priority_as_it_was() -> None:
    asked = in_a_process(
        "import os, sys; from kvkeep.daemon.latency import *; os.nice(3); print(ask_for_short_slices());"
        "from tests.daemon.test_latency import attributes; print(*attributes(0))"
    ).split()
    assert asked[0] == "True"
    _, policy, _, nice, _, runtime, _, _ = map(int, asked[1:])
    assert (policy, nice) == (0, 3)
    assert runtime in (SLICE_NS, 0)  # 0: a kernel before 6.12, which has no slices to ask for


def test_the_control_process_asks(daemon) -> None:  # type: ignore[no-untyped-def]
    assert attributes(daemon.pid)[5] == attributes_after_asking()


def attributes_after_asking() -> int:
    return int(
        in_a_process(
            "from kvkeep.daemon.latency import *; ask_for_short_slices();"
            "from tests.daemon.test_latency import attributes; print(attributes(0)[5])"
        )
    )


def test_an_operators_choice_of_policy_stays() -> None:
    answer = in_a_process(
        "import os; from kvkeep.daemon.latency import *; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0));"
        "print(ask_for_short_slices(), os.sched_getscheduler(0))"
    )
    assert answer == f"False {os.SCHED_BATCH}"
