"""Log lines on standard error: for people on a terminal, one JSON object a line elsewhere.

Everything goes through the standard `logging` under the name ``kvkeep``.  A log line never carries tokens, hashes of
prompts or salts.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_SHORT = {"WARNING": "warn", "CRITICAL": "error"}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = _SHORT.get(record.levelname, record.levelname.lower())
        line = f"{clock}.{int(record.msecs):03d} {level:<5} {record.name}: {record.getMessage()}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": _SHORT.get(record.levelname, record.levelname.lower()),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def setup(level: str, form: str) -> None:
    """``form`` is ``auto``, ``text`` or ``json``."""
    if form == "auto":
        form = "text" if sys.stderr is not None and sys.stderr.isatty() else "json"
    handler = logging.StreamHandler()
    handler.setFormatter(_Text() if form == "text" else _Json())
    logger = logging.getLogger("kvkeep")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    logging.raiseExceptions = False  # a closed stderr must not print tracebacks into nowhere
