"""LMCache's own command line, pointed at kvkeep's web process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Daemon
from tests.daemon.l2_helpers import attach, chain, fs, register, store
from tests.ipc.conftest import eventually

pytest.importorskip("lmcache.cli.main", reason="lmcache is not installed here")


def lmcache(daemon: Daemon, *words: str) -> tuple[int, str]:
    url = daemon.run_dir / "http.url"
    eventually(url.exists)
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", *words]
    done = subprocess.run([*command, "--url", url.read_text().strip()], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_it_describes_clears_and_is_told_about_quotas(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon("--http-port=0", "--chunk-size=32", fs(tmp_path / "l2"))
    with attach(daemon) as kv:
        store(kv, register(kv), chain(1, 3))
        eventually(lambda: kv.stats()["l1"]["entries"] == 3)
        status, said = lmcache(daemon, "kvcache", "clear")
        assert status == 0, said
        assert kv.stats()["l1"]["entries"] == 0
    status, said = lmcache(daemon, "describe", "kvcache")
    assert status == 0, said
    about = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    assert about["Health"].strip() == "OK"
    assert about["Chunk size"].strip() == "32"
    assert about["L1 capacity (GB)"].strip() == "0.06"
    status, said = lmcache(daemon, "quota", "delete", "somebody")
    assert status != 0
    assert "--tenant-quotas" in said
