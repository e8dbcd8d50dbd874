"""How a half of the connector attaches to the daemon.  In one place, so that tests can put something in between."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.ipc.client import Client
    from kvkeep.ipc.vllm.options import Options


def attach(options: Options, label: str) -> Client:
    """Returns at once.  The client attaches in the background, and again after each restart of the daemon."""
    from kvkeep.ipc.client import Client

    return Client.attach(options.run_dir or None, name=label, wait=False)


def wait(client: Any, longest_s: float) -> None:
    """Until it is attached; for the start of an engine, so that its first requests find the daemon."""
    until = time.monotonic() + longest_s
    while not client.attached and time.monotonic() < until:
        time.sleep(0.005)
