"""What both sides of the attach socket share: the frame, the limit of a socket's path, the refusal as an exception."""

from __future__ import annotations

import os
import struct

from kvkeep.ipc.messages import AttachMessage, encode

HEADER = struct.Struct("<I")
ARENA_FDS = 3  # meta, data, eventfd
MAX_SOCKET_PATH_BYTES = 107


class AttachRefused(Exception):
    """The daemon answered, and its answer was no.  ``code`` is that of `Refused`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def frame(message: AttachMessage) -> bytes:
    """One message as it travels: u32 length, msgpack."""
    body = encode(message)
    return bytes(HEADER.pack(len(body)) + body)


def check_path(path: str) -> None:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"socket path {path} has {length} bytes, the kernel's limit is {MAX_SOCKET_PATH_BYTES}; "
            "use a shorter --run-dir"
        )
