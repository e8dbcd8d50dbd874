"""`kvkeep bench engine --quick` with real engines: it measures nothing, but all of it runs and is checked."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

CASES = {"miss/512", "hit/512", "hit_together/512", "scheduler/miss/512", "scheduler/hit/512", "decode_messages"}


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    """What it printed, by case."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvkeep.daemon.cli", "bench", "engine", "--quick", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": folder},
        )
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, out + err
        assert os.listdir(folder) == []
        assert not [path for path in Path("/dev/shm").iterdir() if f"kvkeep-bench-{process.pid}" in path.name]
        return {line["case"]: line for line in map(json.loads, out.splitlines())}


def test_each_case_is_measured_and_none_has_failed(lines: dict[str, dict[str, Any]]) -> None:
    assert set(lines) >= CASES
    for name in CASES:
        assert isinstance(lines[name]["value"], int | float), lines[name]
        assert "failed" not in lines[name]
    assert lines["miss/512"]["reference"] > 0


def test_a_step_that_only_decodes_sends_no_message(lines: dict[str, dict[str, Any]]) -> None:
    line = lines["decode_messages"]
    assert line["prefill_messages"] > 0  # what counts them can see them
    assert (line["value"], line["ok"]) == (0, True)


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="lmcache is installed")
def test_a_peer_that_is_not_there_is_one_line(lines: dict[str, dict[str, Any]]) -> None:
    assert "lmcache is not installed" in lines["lmcache"]["not_measured"]
    assert not [name for name in lines if name.endswith("/lmcache")]
