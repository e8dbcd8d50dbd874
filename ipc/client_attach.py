"""One attempt to attach: connect, say Hello, map what comes back."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvkeep.ipc.attach_client import connect
from kvkeep.ipc.client_arena import Arena, ArenaError
from kvkeep.ipc.client_rpc import Attachment
from kvkeep.ipc.copying import DEFAULT_THREADS
from kvkeep.ipc.messages import SUPPORTED_VERSIONS, Hello
from kvkeep.ipc.rundir import find_run_dir
from kvkeep.shm.layout import ABI_VERSION

HANDSHAKE_S = 10.0  # in the background: long enough for a host under load


@dataclass(frozen=True)
class Options:
    run_dir: str | os.PathLike[str] | None
    name: str
    arena: bool
    copy_threads: int = DEFAULT_THREADS


def attach_path(options: Options) -> str:
    """Looked up anew for each attempt: the daemon may appear in another of the usual places."""
    return f"{find_run_dir(options.run_dir)}/attach.sock"


def open_attachment(options: Options, previous_lease: int) -> Attachment:
    """Raises AttachRefused, OSError, ArenaError or ValueError; leaves nothing open then."""
    path = attach_path(options)
    hello = Hello(SUPPORTED_VERSIONS, options.name, previous_lease, options.arena, ABI_VERSION)
    sock, welcome, fds = connect(path, hello, HANDSHAKE_S)
    try:
        arena = Arena(welcome, fds[0], fds[1]) if fds else None
        own = f"{os.path.dirname(path)}/rpc.sock"  # the daemon may see its directory under another path
        endpoint = f"ipc://{own}" if os.path.exists(own) else welcome.rpc_endpoint
        if not endpoint.startswith("ipc://"):
            raise ArenaError(f"the daemon names {endpoint!r} as its RPC socket, which is not a local one")
        attachment = Attachment(sock, welcome, arena, fds.pop() if fds else -1, endpoint)
        if arena is not None:
            arena.populate()
        return attachment
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
