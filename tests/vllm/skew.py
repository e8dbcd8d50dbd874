"""Client and daemon of another version: on the wire and in shared memory they say other numbers.

    python skew.py '{"versions": [2], "abi": 1}' --name … --run-dir …        is such a kvkeepd

What a version changes there is unknown; that it is refused is decided by these numbers alone, before anything else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def client(versions: Sequence[int], abi: int, refused_backoff_s: float) -> None:
    """From its next attempt to attach on, the client library of this process speaks and reads these."""
    from kvkeep.ipc import client_attach, client_session
    from kvkeep.shm import layout

    client_attach.SUPPORTED_VERSIONS = tuple(versions)  # type: ignore[assignment]
    client_attach.ABI_VERSION = layout.ABI_VERSION = abi
    client_session.REFUSED_BACKOFF_S = refused_backoff_s


def daemon(versions: Sequence[int], abi: int, argv: Sequence[str]) -> int:
    from kvkeep.daemon import control, main
    from kvkeep.ipc import attach
    from kvkeep.shm import layout, segments

    attach.SUPPORTED_VERSIONS = tuple(versions)  # type: ignore[assignment]
    control.ABI_VERSION = segments.ABI_VERSION = layout.ABI_VERSION = abi
    return main.main(argv)


if __name__ == "__main__":
    sys.exit(daemon(**json.loads(sys.argv[1]), argv=sys.argv[2:]))
