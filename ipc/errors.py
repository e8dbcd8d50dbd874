"""What a client raises.  Only attach, register and management calls do; the data path answers with misses instead."""

from __future__ import annotations

from kvkeep.ipc.attach_frames import AttachRefused


class Unavailable(Exception):
    """The daemon is not there, or did not answer in time."""


class Denied(Exception):
    """The daemon does not let this user do it."""


class ProtocolError(Exception):
    """The daemon refused the request, or answered with what is no answer.  ``code`` is an ErrorCode value, or ""."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


__all__ = ["AttachRefused", "Denied", "ProtocolError", "Unavailable"]
