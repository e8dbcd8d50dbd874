"""Readiness, status and watchdog towards systemd, over the datagram socket in ``NOTIFY_SOCKET``.

Without that variable every call does nothing.  Nothing here raises or blocks: a service manager that does not listen
is no reason to stop serving engines.  See sd_notify(3) for the words.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """``ready()`` once attachable, ``watchdog()`` at least every `watchdog_interval`, ``stopping()`` before the end."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._interval = _interval(environ)
        self._socket: socket.socket | None = None
        if self._address.startswith(("/", "\0")):
            try:
                self._socket = socket.socket(
                    socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
                )
            except OSError:
                pass

    def watchdog_interval(self) -> float | None:
        """Seconds between two `watchdog` calls, half of what systemd allows; None = no watchdog."""
        return self._interval

    def ready(self, status: str = "") -> bool:
        return self._send("READY=1", status)

    def status(self, status: str) -> bool:
        return self._send("", status)

    def watchdog(self) -> bool:
        return self._send("WATCHDOG=1")

    def reloading(self) -> bool:
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        return self._send("STOPPING=1", status)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str, status: str = "") -> bool:
        """True if the service manager took it."""
        if self._socket is None:
            return False
        lines = [state] if state else []
        if status:
            lines.append("STATUS=" + status.replace("\n", " "))
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
        except OSError:
            return False
        return True


def _interval(environ: Mapping[str, str]) -> float | None:
    microseconds, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or int(microseconds) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(microseconds) / 2e6
