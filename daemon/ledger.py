"""What is still to be removed from L2, on disk: so that a restart of the daemon does not bring it back.

One small file in the run directory, replaced as a whole; what counts as saved survives a power cut.  A thread writes
it, because the control loop does no disk I/O; who needs to know waits until `saved` has come up to the number that
`save` gave, but not for ever: the disk may hang.

    {"version": 1, "media": {medium: [[namespace, shards, packed chunk hashes or nil], …]}}     msgpack, see media.py
"""

from __future__ import annotations

import logging
import os
import threading

import msgspec

log = logging.getLogger("kvkeep.forget")

NAME = "l2-removals"
Entry = tuple[bytes, int, bytes | None]  # namespace digest (b"" = all), shards, hashes (None = all of it)


class _Document(msgspec.Struct):
    version: int
    media: dict[str, list[Entry]]


class Ledger:
    """`load` and `save` are for one thread; the writing is another's."""

    def __init__(self, run_dir: str) -> None:
        self.path = os.path.join(run_dir, NAME)
        self._lock = threading.Lock()
        self._wanted: dict[str, list[Entry]] = {}
        self._number = 0
        self._running = False
        self.saved = 0
        self.problem = ""  # why the last writing failed

    def load(self) -> dict[str, list[Entry]]:
        """Blocks.  What cannot be read is logged, and nothing."""
        try:
            with open(self.path, "rb") as file:
                document = msgspec.msgpack.decode(file.read(), type=_Document)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as problem:
            log.error("%s cannot be read (%s): clear again what must not come back from L2", self.path, problem)
            return {}
        return document.media

    def save(self, media: dict[str, list[Entry]]) -> int:
        """Does not block.  Whoever gave number n can rely on it when ``saved`` >= n."""
        with self._lock:
            self._number += 1
            self._wanted = media
            if not self._running:
                self._running = True
                threading.Thread(target=self._write, name="ledger", daemon=True).start()
            return self._number

    def _write(self) -> None:
        while True:
            with self._lock:
                number, wanted = self._number, self._wanted
                if number == self.saved:
                    self._running = False
                    return
            try:
                self._replace(msgspec.msgpack.encode(_Document(1, wanted)) if wanted else b"")
                self.problem = ""
            except OSError as problem:
                self.problem = f"{self.path} cannot be written ({problem.strerror})"
                log.error("%s: a restart would forget what is to be removed from L2", self.problem)
            self.saved = number

    def _replace(self, data: bytes) -> None:
        if not data:
            if os.path.lexists(self.path):
                os.unlink(self.path)
                self._sync_name()
            return
        temp = self.path + ".new"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with memoryview(data) as left:
                at = 0
                while at < len(left):
                    at += os.write(fd, left[at:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, self.path)
        self._sync_name()

    def _sync_name(self) -> None:
        fd = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
