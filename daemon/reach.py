"""Can this process reach that daemon, and if not, why not?  One sentence, for `kvkeep` and its doctor.

Looks from the outside in: the run directory, the lock that a living daemon holds, the socket, the right to connect.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
from typing import NamedTuple

CONNECT_S = 2.0


class Reach(NamedTuple):
    reachable: bool
    message: str


def look(run_dir: str) -> Reach:
    attach = os.path.join(run_dir, "attach.sock")
    try:
        os.stat(run_dir)
    except FileNotFoundError:
        return Reach(
            False,
            f"no kvkeepd runs for {run_dir}, which does not exist: start kvkeepd, or name another instance "
            "with --name or --run-dir (KVKEEP_RUN_DIR)",
        )
    except PermissionError:
        return Reach(False, f"{run_dir} is closed to {_me()}: {_let_in(os.path.dirname(run_dir))}")
    held = lock_is_held(run_dir)
    try:
        mode = os.stat(attach)
    except FileNotFoundError:
        if held:
            return Reach(False, f"a kvkeepd is starting or stopping in {run_dir}: try again in a moment")
        return Reach(False, f"no kvkeepd is running in {run_dir}: start it")
    except PermissionError:
        return Reach(False, f"{run_dir} is closed to {_me()}: {_let_in(run_dir)}")
    if not stat.S_ISSOCK(mode.st_mode):
        return Reach(False, f"{attach} is not a socket: remove it and start kvkeepd again")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(attach)
        except OSError as problem:
            return Reach(False, _refusal(attach, problem, held))
    return Reach(True, f"kvkeepd accepts connections at {attach}")


def untrusted(run_dir: str) -> str:
    """Why a daemon should not put its sockets there, or "": somebody else could replace them."""
    for path in (os.path.dirname(run_dir), run_dir):
        try:
            folder = os.stat(path)
        except OSError:
            continue  # not there yet
        if not stat.S_ISDIR(folder.st_mode):
            return f"{path} is not a directory: remove it, or give another --run-dir"
        if folder.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to uid {folder.st_uid}, who could replace the sockets: give another --run-dir"
        if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
            return f"{path} is writable for everybody, who could replace the sockets: chmod o-w {path}"
    return ""


def lock_is_held(run_dir: str) -> bool | None:
    """None = cannot be told (the lock belongs to another user)."""
    try:
        fd = os.open(os.path.join(run_dir, "lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, and given up at once
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _refusal(attach: str, problem: OSError, held: bool | None) -> str:
    if problem.errno == errno.ECONNREFUSED:
        return f"no kvkeepd is running, its socket {attach} is left over: start it"
    if problem.errno in (errno.EACCES, errno.EPERM):
        return f"{attach} is closed to {_me()}: {_let_in(attach)}"
    if isinstance(problem, TimeoutError) or problem.errno == errno.EAGAIN:
        return f"kvkeepd does not accept connections at {attach}: it hangs or is stopped, see its log"
    state = "a kvkeepd runs there" if held else "no kvkeepd seems to run there"
    return f"cannot connect to {attach} ({problem.strerror}); {state}"


def _me() -> str:
    try:
        return f"user {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"uid {os.geteuid()}"


def _let_in(path: str) -> str:
    """What would open ``path`` to us."""
    try:
        gid = os.stat(path).st_gid
    except OSError:
        return "become a member of the daemon's group, or start it with --socket-group"
    try:
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        group = str(gid)
    return f"become a member of group {group}, or start kvkeepd with another --socket-group"
