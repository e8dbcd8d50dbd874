"""What the README tells a newcomer to do works as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvkeep.daemon.lmcache import FLAGS
from kvkeep.daemon.options import OPTIONS
from kvkeep.daemon.web.calls import Settings
from kvkeep.daemon.web.lmcache import Endpoints
from kvkeep.daemon.web.metrics import render
from tests.conftest import Daemon

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs_against_a_daemon(make_daemon: Callable[..., Daemon]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
    environ["KVKEEP_RUN_DIR"] = str(make_daemon().run_dir)
    subprocess.run([sys.executable, "-c", code], env=environ, timeout=60, check=True)


def test_every_flag_and_file_that_the_documents_name_exists():
    flags = {option.flag for option in OPTIONS} | {"--config", "--print-config", "--help", "--json", "--diff", "--yes"}
    flags |= {"--l1-only", "--adapter", "--namespace"}  # of kvkeep
    benchmarks = {
        "--quick",
        "--only",
        "--seed",
        "--data",
        "--dtype",
        "--dir",
        "--peer",
        "--runs",
        "--calm",
        "--peer-python",
    }
    foreign = {"--kv-transfer-config", "--shm-size", "--now", "--create", "--no-deps"}
    foreign |= {"--supported-transfer-mode", "--shm-name", "--no-l1-use-lazy"}  # of `lmcache server`
    migration = {"--toml", "--url"} | {f"--{name}" for name in FLAGS}
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        if document.name in ("vllm.md", "sglang.md"):  # most flags there are the engines'
            continue
        text = document.read_text()
        known = flags | benchmarks | foreign | (migration if document.name == "migrate-from-lmcache.md" else set())
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) <= known, document
        for path in re.findall(r"`((?:docs|tests|systemd|shm|ipc|daemon)/[\w./-]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_the_way_from_lmcache_names_every_flag_path_and_only_metrics_that_there_are():
    text = (ROOT / "docs" / "migrate-from-lmcache.md").read_text()
    assert {f"--{name}" for name in FLAGS} <= set(re.findall(r"--[a-z0-9-]+", text))
    series = {line.split()[2] for line in render({}).splitlines() if line.startswith("# TYPE")}
    assert set(re.findall(r"kvkeep_[a-z0-9_]+", text)) <= series
    for _, path in Endpoints(Settings())._handlers:
        assert path in text


def test_the_settings_of_the_makefile_are_settings():
    text = (ROOT / "Makefile").read_text()
    for flag in re.findall(r"kvkeepd --name \S+ (--\S+) \S+ (--\S+)", text)[0]:
        assert flag in {option.flag for option in OPTIONS}
