"""A real LMCache engine on CPU with kvkeep as its only storage: both are restarted, and the chunks are still there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Daemon

pytest.importorskip("lmcache")
pytest.importorskip("torch")

CHUNK = 16
ENGINE = Path(__file__).with_name("plugin_engine.py")


def engine(daemon: Daemon, what: str, tokens: int) -> dict[str, Any]:
    command = [sys.executable, str(ENGINE), what, str(daemon.run_dir), str(tokens)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_an_engine_gets_its_chunks_back_after_both_were_restarted(make_daemon: Callable[..., Daemon]) -> None:
    """What LMCache evicted from CPU memory comes from the daemon, in the engine that stored it and in the next one."""
    daemon = make_daemon()
    tokens = 448 * CHUNK + 5  # 14 MiB of KV, with 10 MiB of CPU memory
    first = engine(daemon, "store", tokens)
    assert first["stored"] == first["chunks"] > 0
    assert first["in_cpu"] < first["chunks"]
    assert first["right"] == first["asked"] > 0
    assert first["failures"] == 0
    assert first["allocated"] == 0
    daemon.restart()
    second = engine(daemon, "load", tokens)
    assert second["right"] == second["asked"] == first["asked"]
    assert second["found"] == tokens
    assert second["hits"] > 0
    assert second["allocated"] == 0
