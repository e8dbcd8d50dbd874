"""The fs adapter's counters and its complaints."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter

from kvkeep.l2.adapter import Outcome, Result

FULL = (errno.ENOSPC, errno.EDQUOT)
GONE = (errno.ENOENT, errno.ESTALE)
NOT_OURS = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)  # a link, a fifo, a directory under one of our names
_COMPLAIN_S = 10.0

log = logging.getLogger("kvkeep.l2.fs")


class Tally:
    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._silenced = 0
        self._complain_at = 0.0
        self._lock = threading.Lock()

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counters[name] += by

    def failed(self, what: str, where: str, error: OSError) -> Result:
        """What the medium did, counted, as a result."""
        code = error.errno or errno.EIO
        self.count(f"{what}_failed")
        self.count(f"errno_{errno.errorcode.get(code, str(code))}")
        detail = f"{what} in {where}: {error.strerror}"
        self.complain(detail)
        return Result(Outcome.NO_SPACE if code in FULL else Outcome.IO_ERROR, code, detail)

    def complain(self, text: str) -> None:
        """One line in a while: a medium that is going fails thousands of times a second; the counters have them all."""
        with self._lock:
            self._silenced += 1
            now = time.monotonic()
            if now < self._complain_at:
                return
            count, self._silenced, self._complain_at = self._silenced, 0, now + _COMPLAIN_S
        log.warning("fs: %s%s", text, f" ({count} such since the last line)" if count > 1 else "")
