"""`kvkeep doctor`: what of this host and this instance stands in the way, and what to change.

Takes the settings that kvkeepd would take (flags, environment, file), so that it judges the arena that would be made.
Looks only; the one thing it touches is a connection to the daemon, which it closes.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvkeep.daemon import reach
from kvkeep.daemon.config import Config, Loaded, version
from kvkeep.daemon.main import need
from kvkeep.shm import hostcheck
from kvkeep.shm.hostcheck import ERROR, OK, WARN, Finding

OLDEST_KERNEL = (5, 10)


def examine(loaded: Loaded) -> list[Finding]:
    config = loaded.config
    document, about_daemon = _daemon(config)
    wanted = need(config)
    if document and loaded.origins["l1_size_gb"] == "default":  # judge the arena that there is
        l1 = document.get("l1", {})
        entries = int(l1.get("entries_capacity", config.entries))
        wanted = need(replace(config, l1_bytes=int(l1.get("bytes_total", config.l1_bytes)), l1_entries=entries))
    return [*_system(), *hostcheck.check(wanted), *_run_dir(config), *about_daemon]


def _system() -> Iterator[Finding]:
    release = platform.release()
    try:
        numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    except ValueError:
        numbers = OLDEST_KERNEL
    if numbers < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        yield Finding(WARN, "kernel", f"Linux {release} is older than {oldest}, the oldest that is tested: upgrade it")
    else:
        yield Finding(OK, "kernel", f"Linux {release}, Python {sys.version.split()[0]}")
    for module in ("posix_ipc", "zmq", "msgspec", "blake3", "xxhash", "numpy"):
        try:
            importlib.import_module(module)
        except ImportError as problem:
            yield Finding(ERROR, "packages", f"{module} cannot be imported ({problem}): install kvkeep again with pip")


def _run_dir(config: Config) -> Iterator[Finding]:
    """Whether kvkeepd, as this user, could put its sockets there."""
    path = config.run_dir
    try:
        folder = os.stat(path)
    except FileNotFoundError:
        parent = path
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        if os.access(parent, os.W_OK | os.X_OK):
            yield Finding(OK, "run-dir", f"{path} does not exist yet and can be made")
        else:
            yield Finding(
                WARN, "run-dir", f"{path} cannot be made by uid {os.geteuid()} in {parent}: give another --run-dir"
            )
        return
    except OSError as error:
        yield Finding(WARN, "run-dir", f"{path} cannot be looked at ({error.strerror})")
        return
    if folder.st_uid not in (os.geteuid(), 0):
        yield Finding(OK, "run-dir", f"{path} belongs to uid {folder.st_uid}, you look as uid {os.geteuid()}")
    elif problem := reach.untrusted(path):
        yield Finding(ERROR, "run-dir", problem)
    else:
        yield Finding(OK, "run-dir", f"{path} is in order")


def _daemon(config: Config) -> tuple[dict[str, Any], list[Finding]]:
    """Its statistics (empty if it does not answer), and what to say about it."""
    there = reach.look(config.run_dir)
    if not there.reachable:
        return {}, [Finding(WARN, "daemon", there.message)]
    from kvkeep.ipc.client import Client

    try:
        with Client.attach(config.run_dir, name="kvkeep-doctor", arena=False) as client:
            document = client.stats()
    except Exception as problem:  # whatever it is, the doctor's answer is that sentence
        return {}, [Finding(ERROR, "daemon", f"kvkeepd accepts connections but does not answer: {problem}")]
    found = []
    ours, theirs = version().removeprefix("kvkeep "), str(document.get("version", "?"))
    if ours != theirs:
        found.append(
            Finding(
                WARN, "version", f"the daemon is kvkeep {theirs}, installed here is {ours}: restart it after an upgrade"
            )
        )
    if document.get("health") == "ok":
        clients = int(document.get("clients_total", 1)) - 1  # the doctor is one
        found.append(Finding(OK, "daemon", f"kvkeepd {theirs} serves {clients} clients, epoch {document.get('epoch')}"))
    else:
        reasons = "; ".join(map(str, document.get("reasons", []))) or "it does not say why"
        found.append(Finding(ERROR, "daemon", f"kvkeepd is degraded: {reasons}"))
    return document, found
