"""`kvkeep migrate lmcache`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.daemon.cli_migrate import migrate
from kvkeep.daemon.config import load
from tests.conftest import Daemon

LINE = (
    "lmcache server --host localhost --port 6555 --l1-size-gb 2 --eviction-policy LRU --chunk-size 256 "
    "--shm-name pool --no-l1-use-lazy --supported-transfer-mode engine_driven --http-port 9000"
)


def run(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep.daemon.cli", "migrate", "lmcache", *words], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_command_line_becomes_one_that_kvkeepd_takes() -> None:
    found = migrate(LINE)
    assert found["refused"] == []
    config = load(found["command"][1:], {}).config
    assert (config.port, config.http_port, config.chunk_size, config.l1_bytes) == (6555, 9000, 256, 2 << 30)
    assert sum("changes nothing here" in note for note in found["notes"]) == 3


def test_the_same_line_starts_kvkeepd_as_it_is() -> None:
    config = load(shlex.split(LINE)[2:], {}).config
    assert (config.port, config.http_port) == (6555, 9000)


def test_flags_that_change_nothing_are_one_line_of_the_log(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon("--shm-name", "pool", "--max-workers=4", "--chunk-size", "16")
    (line,) = [line for line in daemon.output().splitlines() if "change nothing here" in line]
    assert "--shm-name: workers are told" in line
    assert "--max-workers: " in line
    assert "--port is not given" in line


def test_their_defaults_are_said() -> None:
    found = migrate("lmcache server --l1-size-gb 2 --eviction-policy LRU")
    config = load(found["command"][1:], {}).config
    assert (config.port, config.http_port) == (5555, 8080)
    assert any("watermark" in note for note in found["notes"])


def test_what_cannot_be_carried_over_is_said_and_is_status_1() -> None:
    status, said = run(f"{LINE} --p2p-advertise-url x --supported-transfer-mode=lmcache_driven --l1-sise 3 --json")
    assert status == 1
    assert "--p2p-advertise-url" in said
    assert "engine_driven" in said
    assert "--l1-sise: neither lmcache server nor kvkeepd has it" in said


def test_json_and_what_cannot_be_read() -> None:
    status, said = run(LINE, "--json")
    assert status == 0
    assert json.loads(said)["command"][0] == "kvkeepd"
    status, said = run("lmcache server --chunk-size 1.5")
    assert (status, "--chunk-size: '1.5' is not a whole number" in said) == (1, True)
    assert run("lmcache server --chunk-size 16 stray")[0] == 2


def test_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "server.yaml"
    path.write_text("l1_size_gb: 2\nport: 6555\nl1_use_lazy: false\nl2_adapter:\n  - {type: fs, base_path: /x}\n")
    found = migrate(str(path))
    assert found["refused"] == []
    config = load(found["command"][1:], {}).config
    assert config.port == 6555
    assert len(config.l2_adapter) == 1
    assert migrate(path.read_text())["command"] == found["command"]


def test_a_manifest_of_kubernetes(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    container = {"command": ["/opt/bin/lmcache", "server"], "args": shlex.split(LINE)[2:]}
    path = tmp_path / "daemonset.yaml"
    spec = {"template": {"spec": {"containers": [{"args": ["other"]}, container]}}}
    path.write_text(yaml.safe_dump_all([{"kind": "Namespace"}, {"kind": "DaemonSet", "spec": spec}]))
    assert migrate(str(path))["command"] == migrate(LINE)["command"]
    container.clear()
    container["command"] = ["sh", "-c", f"exec {LINE}"]
    path.write_text(yaml.safe_dump({"spec": spec}))
    assert migrate(str(path))["command"] == migrate(LINE)["command"]


def test_a_file_for_kvkeepd(tmp_path: Path) -> None:
    found = migrate(LINE)
    path = tmp_path / "kvkeepd.toml"
    path.write_text(found["toml"])
    assert load(["--config", str(path)], {}).config == load(found["command"][1:], {}).config
    status, said = run("--toml", LINE)
    assert status == 0
    path.write_text(said)  # notes and all
    assert load(["--config", str(path)], {}).config.port == 6555


def test_one_manager_of_memory_is_ours() -> None:
    manager = {"type": "DRAM", "size_gb": 3, "eviction": {"eviction_policy": "ARC", "trigger_watermark": 0.9}}
    found = migrate(shlex.join(["--l1-manager", json.dumps(manager)]))
    config = load(found["command"][1:], {}).config
    assert (found["refused"], config.l1_bytes, config.eviction_policy) == ([], 3 << 30, "ARC")
    assert config.eviction_trigger_watermark == 0.9
    assert migrate(shlex.join(["--l1-manager", '{"type": "GDS", "path": "/x"}']))["refused"]


def test_an_adapter_that_is_not_here_is_said() -> None:
    (problem,) = migrate(shlex.join(["--l1-size-gb", "2", "--l2-adapter", '{"type": "s3", "s3_region": "x"}']))[
        "refused"
    ]
    assert problem.startswith("--l2-adapter: ")
