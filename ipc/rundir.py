"""Where a daemon's sockets are, when nobody says: the same rule for the daemon and for its clients.

    as root      /run/kvkeep/NAME
    otherwise    $XDG_RUNTIME_DIR/kvkeep/NAME, else /tmp/kvkeep-UID/NAME

A client looks at its own user's place first and then at the system's.  ``KVKEEP_RUN_DIR`` (a directory) or
``KVKEEP_NAME`` override the default.  A directory under /tmp is used only if it belongs to us: anybody may create it.
"""

from __future__ import annotations

import os

DEFAULT_NAME = "default"


def run_dir_of(name: str) -> str:
    """Where a daemon of this user and name puts its sockets."""
    if os.getuid() == 0:
        return f"/run/kvkeep/{name}"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/kvkeep/{name}" if runtime else f"/tmp/kvkeep-{os.getuid()}/{name}"


def find_run_dir(run_dir: str | os.PathLike[str] | None) -> str:
    """Where a client looks now: the argument, the environment, or the first usual place that has a daemon."""
    chosen = os.fspath(run_dir) if run_dir is not None else os.environ.get("KVKEEP_RUN_DIR")
    if chosen:
        return os.path.abspath(chosen)
    name = os.environ.get("KVKEEP_NAME") or DEFAULT_NAME
    own, system = run_dir_of(name), f"/run/kvkeep/{name}"
    if not _ours(own):
        return system
    return own if os.path.exists(f"{own}/attach.sock") or not os.path.exists(f"{system}/attach.sock") else system


def _ours(path: str) -> bool:
    if not path.startswith("/tmp/"):
        return True
    try:
        return os.stat(os.path.dirname(path)).st_uid == os.getuid()
    except OSError:
        return True  # not there yet: nothing that could deceive us
