"""The client library's warnings go into the engine's log.

The library logs to Python's ``kvkeep`` loggers, for which vLLM configures nothing: a line would be bare text, without
time, process or our name.
"""

from __future__ import annotations

import logging

OURS = logging.getLogger("kvkeep")


class _Forward(logging.Handler):
    def __init__(self, to: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self.to = to

    def emit(self, record: logging.LogRecord) -> None:
        self.to.log(record.levelno, "kvkeep: %s", record.getMessage(), exc_info=record.exc_info)


def forward(to: logging.Logger) -> None:
    """Unless somebody has configured our loggers.  Safe to call more than once."""
    if not OURS.hasHandlers():
        OURS.addHandler(_Forward(to))
