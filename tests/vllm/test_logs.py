"""What the client library warns of is in the engine's log, once."""

from __future__ import annotations

import logging

import pytest

from kvkeep.ipc.vllm import logs


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """As in an engine: nobody has configured it.  (pytest would listen to a logger that it can find.)"""
    logger = logging.Logger("test of kvkeep")
    monkeypatch.setattr(logs, "OURS", logger)
    return logger


@pytest.fixture
def engine() -> tuple[logging.Logger, Heard]:
    logger, heard = logging.Logger("test of an engine"), Heard()
    logger.addHandler(heard)
    return logger, heard


def test_a_warning_is_passed_on_once_with_our_name_and_a_note_is_not(
    ours: logging.Logger, engine: tuple[logging.Logger, Heard]
) -> None:
    logger, heard = engine
    for _ in range(2):  # both halves do
        logs.forward(logger)
    ours.warning("no daemon at %s", "/x")
    ours.info("attached")
    assert heard.lines == ["WARNING kvkeep: no daemon at /x"]


def test_who_configured_our_loggers_keeps_them(ours: logging.Logger, engine: tuple[logging.Logger, Heard]) -> None:
    logger, heard = engine
    own = Heard()
    ours.addHandler(own)
    logs.forward(logger)
    ours.warning("no daemon")
    assert (own.lines, heard.lines) == (["WARNING no daemon"], [])
