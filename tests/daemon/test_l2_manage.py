"""`kvkeep l2` and `kvkeep clear`, with a daemon and without one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvkeep.daemon.cli_l2 import Bar
from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.daemon.l2_helpers import SIZE, Make, adapter, at_rest, attach, chain, fs, raw, read, register, store, stored

MANIFESTS = 2  # one object of the catalogue per namespace


def kvkeep(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvkeep.daemon.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False)


def ask(daemon: Daemon, *words: str) -> Any:
    done = kvkeep("--run-dir", str(daemon.run_dir), *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def filled(daemon: Daemon, adapters: int = 1) -> tuple[Client, list[bytes]]:
    kv = attach(daemon)
    keys = chain(1, 20)
    store(kv, register(kv), keys)
    store(kv, kv.register({"model": "other"}, shard_bytes=SIZE), chain(2, 10))
    for index in range(adapters):
        stored(kv, 30, index)
    return kv, keys


def test_ls_and_stat_show_what_is_where(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path / "fs", name="disk"), raw(tmp_path), adapter(type="mock"))
    kv, keys = filled(daemon, 3)
    with kv:
        other = kv.register({"model": "other"}, shard_bytes=SIZE)
        for part in ask(daemon, "l2", "ls")["adapters"]:
            assert len(part["objects"]) == 30
            assert {key.hex() for key in keys} < {one["chunk"] for one in part["objects"]}
            assert {one["bytes"] for one in part["objects"]} == {SIZE}
        found = ask(daemon, "l2", "ls", "disk", "--namespace", other.digest.hex()[:8], "--limit", "4")
        assert [len(found["adapters"]), len(found["adapters"][0]["objects"])] == [1, 4]
        assert found["adapters"][0]["more"]
        assert found["manifests"][other.digest.hex()]["model"] == "other"
        text = kvkeep("--run-dir", str(daemon.run_dir), "l2", "ls", "l2-1").stdout
        assert "model=other" in text
        assert keys[0].hex()[:16] in text
        for row in ask(daemon, "l2", "stat")["adapters"]:
            assert row["objects"] == 30 + MANIFESTS * (row["type"] != "mock")
            assert {space["objects"]: space["bytes"] for space in row["namespaces"]} == {20: 20 * SIZE, 10: 10 * SIZE}
            assert row["breaker"] == "closed"
        assert "10 objects" in kvkeep("--run-dir", str(daemon.run_dir), "l2", "stat", "disk").stdout
        wrong = kvkeep("--run-dir", str(daemon.run_dir), "l2", "ls", "disc")
        assert wrong.returncode == 2
        assert "l2-0 (disk), l2-1 (raw_block)" in wrong.stderr
        at_rest(kv)


def test_verify_finds_and_removes_what_is_corrupt(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path / "fs"), raw(tmp_path))
    kv, keys = filled(daemon, 2)
    with kv:
        for part in ask(daemon, "l2", "verify")["adapters"]:
            assert (part["objects"], part["corrupt"], part["unreadable"]) == (30 + MANIFESTS, 0, 0)
            assert 30 * SIZE < part["bytes"] < 30 * SIZE + 1000
        files = (path for path in (tmp_path / "fs" / "objects").rglob("*") if path.is_file())
        objects = sorted(path for path in files if path.stat().st_size > SIZE)
        for path, at in ((objects[0], 4096 + 5), (objects[1], 40)):  # of the payload, of the header
            damage(path, at)
        content = (tmp_path / "raw").read_bytes()
        headers = [at for at in range(0, len(content), 4096) if content[at : at + 8] == b"KVKEEPR1"]
        damage(tmp_path / "raw", headers[3] + 4096 + 9)
        done = kvkeep("--run-dir", str(daemon.run_dir), "l2", "verify", "--json")
        assert done.returncode == 1
        parts = json.loads(done.stdout)["adapters"]
        assert [part["corrupt"] for part in parts] == [2, 1]
        assert len(parts[0]["details"]) == 2
        kv.clear(l1_only=True)
        assert [part["corrupt"] for part in ask(daemon, "l2", "verify")["adapters"]] == [0, 0]
        assert read(kv, register(kv), keys) <= 20
        at_rest(kv)


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_compact_says_what_it_did(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path / "fs"), raw(tmp_path), adapter(type="mock"))
    kv, keys = filled(daemon, 3)
    with kv:
        root = tmp_path / "fs"
        (root / "tmp" / "0123456789abcdef.7").write_bytes(b"left by a dead process")
        (root / "KVKEEP-FS.0123456789abcdef").write_bytes(b"so is this")
        (root / "objects" / "note.txt").write_bytes(b"not ours")
        lost = root / "objects" / "ab" / ("ab" + "0" * 38)
        lost.parent.mkdir(exist_ok=True)
        lost.write_bytes(bytes(8192))
        disk, block, mock = ask(daemon, "l2", "compact")["adapters"]
        assert disk["did"]["stale_temporaries_removed"] == 1
        assert disk["did"]["unfinished_marks_removed"] == 1
        assert disk["did"]["unreachable_files_removed"] == 1
        assert disk["did"]["empty_folders_removed"] > 200
        assert (root / "objects" / "note.txt").exists()
        assert block["did"]["tables_written"] >= 1
        assert mock["did"] == {}
        again = kvkeep("--run-dir", str(daemon.run_dir), "l2", "compact").stdout
        assert "l2-0 (fs): there was nothing to do" in again
        assert "l2-2 (mock): there was nothing to do" in again
        kv.clear(l1_only=True)
        assert read(kv, register(kv), keys) == 20
        more = chain(5, 20)
        store(kv, register(kv), more)
        stored(kv, 50)
        at_rest(kv)
    daemon.kill()
    daemon.start("--forget")
    with attach(daemon) as kv:
        assert read(kv, register(kv), keys) == 20
        at_rest(kv)


@pytest.mark.parametrize("kind", ["fs", "raw_block"])
def test_without_a_daemon_the_medium_is_opened_here(make_daemon: Make, tmp_path: Path, kind: str) -> None:
    daemon = make_daemon(fs(tmp_path / "fs") if kind == "fs" else raw(tmp_path))
    where = {"base_path": str(tmp_path / "fs")} if kind == "fs" else {"path": str(tmp_path / "raw")}
    config = json.dumps({"type": kind, **where})
    kv, keys = filled(daemon)
    with kv:
        refused = kvkeep("l2", "--adapter", config, "ls")
        assert refused.returncode == 3
        assert len(refused.stderr.splitlines()) == 1
        assert "in use" in refused.stderr or "belongs to another process" in refused.stderr
    assert daemon.stop() == 0
    done = kvkeep("l2", "--adapter", config, "ls", "--json")
    assert done.returncode == 0, done.stderr
    (part,) = json.loads(done.stdout)["adapters"]
    assert {key.hex() for key in keys} < {one["chunk"] for one in part["objects"]}
    assert kvkeep("l2", "--adapter", config, "verify").returncode == 0
    assert json.loads(kvkeep("l2", "--adapter", config, "stat", "--json").stdout)["adapters"][0]["objects"] == 32
    typo = kvkeep("l2", "--adapter", config.replace(str(tmp_path), str(tmp_path / "typo")), "ls")
    assert typo.returncode == 2
    assert "is not there" in typo.stderr
    assert not (tmp_path / "typo").exists()


def test_clear_tells_what_became_of_l2(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path))
    kv, _ = filled(daemon)
    with kv:
        other = kv.register({"model": "other"}, shard_bytes=SIZE)
        text = kvkeep("--run-dir", str(daemon.run_dir), "clear", str(other.id), "--yes", "--l1-only").stdout
        assert text == "10 chunks dropped\n"
        text = kvkeep("--run-dir", str(daemon.run_dir), "clear", other.digest.hex(), "--yes").stdout
        assert text == "0 chunks dropped\nl2-0 (fs): 10 objects removed\n"
        assert ask(daemon, "clear", "--yes")["l2"][0]["removed"] == 20
        at_rest(kv)


def test_management_through_the_daemon_has_its_limits(make_daemon: Make, tmp_path: Path) -> None:
    from kvkeep.ipc.errors import ProtocolError

    with attach(make_daemon(fs(tmp_path))) as kv:
        with pytest.raises(
            ProtocolError, match="no management of L2; there are list, tally, manifest, verify, compact"
        ):
            kv.l2("l2-0", "wipe")
        with pytest.raises(ProtocolError, match=r"no L2 adapter 'l2-7'; there are l2-0 \(fs\)"):
            kv.l2("l2-7", "list")
        assert kv.l2("fs", "list")["rows"] == []


def test_a_bar_shows_only_on_a_terminal_and_only_after_a_second() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now = [0.0]
    stream, pipe = Terminal(), io.StringIO()
    bar, silent = Bar("checking l2-0", 10, stream, lambda: now[0]), Bar("checking", 10, pipe, lambda: now[0])
    bar.show(1)
    assert stream.getvalue() == ""
    now[0] = 1.5
    bar.show(5)
    silent.show(5)
    assert "5 of 10" in stream.getvalue()
    assert pipe.getvalue() == ""
