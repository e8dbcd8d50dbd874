"""How many more files this process may open.

libzmq ends the process when `accept` says EMFILE, so whoever may connect could end the daemon.  Therefore nobody goes
to the limit: first no client is admitted any more, then the RPC socket hides until some are free again.
"""

from __future__ import annotations

import os
import resource

_FOLDER = "/proc/self/fd"
_LEFT_MOST = 2048  # for what libzmq accepts before the control loop has looked: on a busy host it may be 0.1 s late


def left() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        used = os.stat(_FOLDER).st_size or len(os.listdir(_FOLDER))  # the size is the count since Linux 6.2
    except OSError:
        return 0  # not even one for the listing
    return int(limit) - used


def reserve() -> int:
    """What the RPC socket leaves free."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _LEFT_MOST if limit == resource.RLIM_INFINITY else min(_LEFT_MOST, int(limit) // 4)


def scarce_for_attach() -> bool:
    """A client that attaches needs some here and one on the RPC socket."""
    return left() < reserve() * 3 // 2


def scarce() -> bool:
    return left() < reserve()
