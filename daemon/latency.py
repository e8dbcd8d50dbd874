"""How soon the control process gets a core when a request comes in.

Its rounds are short and whoever waits for one may hold a GPU meanwhile, but on a node whose cores are all busy copying
a thread that wakes up waits for the end of somebody's time slice, some milliseconds.  Linux 6.12 and later run a thread
earlier that asks for short slices (``sched_runtime`` in sched_setattr(2), for ordinary threads of any user); its share
of the processor stays what it was.  Elsewhere the call is refused or without effect.
"""

from __future__ import annotations

import ctypes
import platform
import struct

SLICE_NS = 100_000  # the kernel's least
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def ask_for_short_slices() -> bool:
    """For the calling thread and those it starts from now on.  False = not to be had here, and nothing changed."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    current = ctypes.create_string_buffer(_ATTR.size)
    if libc.syscall(ctypes.c_long(number + 1), 0, current, _ATTR.size, 0):  # sched_getattr
        return False
    _, policy, flags, nice, priority, _, _, _ = _ATTR.unpack(current.raw)
    if policy != 0:  # not SCHED_OTHER: an operator's choice, which stays
        return False
    wanted = _ATTR.pack(_ATTR.size, policy, flags, nice, priority, SLICE_NS, 0, 0)
    return bool(libc.syscall(ctypes.c_long(number), 0, wanted, 0) == 0)
