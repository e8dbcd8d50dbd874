"""LMCache's own wire client, `lmcache bench server`, against kvkeepd."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import Daemon
from tests.lmcache.peer import url_of

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("needs lmcache: make test-lmcache", allow_module_level=True)

SHAPE = "({planes},256,16,2,16):float16:4"  # planes, blocks, tokens a block, heads, head size : dtype : layers
REQUESTS = 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("more", [[], ["--tp-size", "2"], ["--use-mla"], ["--use-mla", "--tp-size", "2"]], ids=" ".join)
def test_every_checksum_is_right(make_daemon: Callable[..., Daemon], more: list[str]) -> None:
    daemon = make_daemon("--port=0")
    shape = SHAPE.format(planes=1 if "--use-mla" in more else 2)
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "server", "--mode", "cpu"]
    command += ["--transfer-mode", "engine_driven", "--rpc-url", url_of(daemon), "--kvcache-shape-spec", shape]
    command += ["--start", "0", "--end", str(REQUESTS), "--interval", "0", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    figures = dict(line.rsplit(":", 1) for line in said.splitlines() if line.count(":") == 1)
    assert int(figures["Checksum OK"]) == REQUESTS, said[-3000:]
    assert int(figures["Checksum FAIL"]) == 0
    assert "STORE: stored" in said
    assert "RETRIEVE: retrieved" in said
    assert "timeout" not in said
