"""`kvkeep` against a real daemon, and against none."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_numbers = itertools.count()
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
PATIENCE_S = 60.0


def kvkeep(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvkeep.daemon.cli", *argv],
        capture_output=True,
        text=True,
        env={**CLEAN, **environ},
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
        check=False,
    )


class Daemon:
    """A kvkeepd of this test's own."""

    def __init__(self, *argv: str) -> None:
        self.name = f"kvk-test-{os.getpid()}-{next(_numbers)}"
        self.run_dir = tempfile.mkdtemp(prefix="kvk-test-")
        self.log = Path(self.run_dir) / "log"
        self.argv = ["--name", self.name, "--run-dir", self.run_dir, "--l1-size-gb", "0.05", *argv]
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvkeep.daemon.main", *self.argv],
                env=CLEAN,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        end = time.monotonic() + PATIENCE_S
        while not self.accepts():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(f"{self.run_dir}/attach.sock")
            return True
        return False

    def kvkeep(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return kvkeep("--run-dir", self.run_dir, *argv)

    def url(self) -> str:
        end = time.monotonic() + PATIENCE_S
        while not (found := re.findall(r"http://127\.0\.0\.1:\d+", self.log.read_text())):
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return str(found[-1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        for part in ("meta", "data"):
            Path(f"/dev/shm/kvkeep-{self.name}-{part}").unlink(missing_ok=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon("--http-port", "0")
    yield made
    made.close()


def store(daemon: Daemon, model: str, chunks: int, **manifest: object) -> None:
    import numpy as np

    from kvkeep.ipc.client import Client

    with Client.attach(daemon.run_dir, name="a test") as client:
        namespace = client.register({"model": model, "kv_dtype": "bfloat16", **manifest}, shard_bytes=4096)
        end = time.monotonic() + PATIENCE_S
        while (l1 := client.stats()["l1"])["bytes_ready"] < l1["bytes_total"]:  # a store before that may find no room
            assert time.monotonic() < end
            time.sleep(0.02)
        hashes = b"".join(i.to_bytes(2, "big") * 16 for i in range(1, chunks + 1))
        assert client.store(namespace, hashes, np.full((chunks, 4096), 7, np.uint8)).stored == chunks


def test_status_ls_diff_check_and_clear_show_what_engines_keep(daemon):
    store(daemon, "org/a", 5)
    store(daemon, "org/b", 2, block_size=32)

    done = daemon.kvkeep("status", "--json")
    document = json.loads(done.stdout)
    assert document["health"] == "ok"
    assert document["l1"]["entries"] == 7
    assert document["clients"] == []
    text = daemon.kvkeep("status").stdout
    assert "7 chunks" in text
    assert ": ok" in text

    spaces = json.loads(daemon.kvkeep("ls", "--json").stdout)["namespaces"]
    assert {n["manifest"]["model"]: n["entries"] for n in spaces} == {"org/a": 5, "org/b": 2}
    a, b = (str(n["id"]) for n in spaces)
    listing = daemon.kvkeep("ls").stdout
    assert "model = org/a" in listing
    assert "model = org/b" in listing
    assert daemon.kvkeep("ls", a).stdout.count("SEALED") == 5
    assert daemon.kvkeep("ls", spaces[0]["digest"][:10], "--limit", "2").stdout.count("SEALED") == 2

    difference = daemon.kvkeep("ls", "--diff", a, b).stdout
    assert f"{a}: org/a" in difference
    assert f"{b}: org/b" in difference
    assert "block_size" in difference
    assert "(absent)" in difference or "32" in difference
    assert "kv_dtype" not in difference

    assert daemon.kvkeep("check").returncode == 0
    refused = daemon.kvkeep("clear", a)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert daemon.kvkeep("clear", a, "--yes").stdout == "5 chunks dropped\n"
    assert json.loads(daemon.kvkeep("clear", "--yes", "--json").stdout) == {"dropped": 2}
    missing = daemon.kvkeep("ls", "99")
    assert missing.returncode == 2
    assert "there is no namespace '99'" in missing.stderr


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/readyz", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:  # a 503 is one too
        return False


def test_what_clients_call_themselves_and_their_models_cannot_steer_the_terminal(daemon):
    from kvkeep.ipc.client import Client

    with Client.attach(daemon.run_dir, name="\x1b[2Jevil\nline") as client:
        for model in ("\x1b]0;title\x07", "\u202eback"):
            client.register({"model": model, "\x1b[31m": 1}, shard_bytes=4096)
        shown = "".join(daemon.kvkeep(*argv).stdout for argv in (["status"], ["ls"], ["ls", "--diff", "1", "2"]))
    assert "\\x1b[2Jevil\\nline" in shown
    assert "\\u202eback" in shown
    assert all(line.isprintable() for line in shown.split("\n"))


def test_the_web_process_shows_the_same_and_is_restarted_when_killed(daemon):
    store(daemon, "org/a", 3)
    end = time.monotonic() + PATIENCE_S
    while True:
        with urllib.request.urlopen(daemon.url() + "/status", timeout=20) as answer:
            document = json.load(answer)
        if document["l1"]["entries"] == 3:
            break
        assert time.monotonic() < end
        time.sleep(0.1)
    with urllib.request.urlopen(daemon.url() + "/metrics", timeout=20) as answer:
        assert "kvkeep_l1_entries 3\n" in answer.read().decode()
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")
    (web,) = map(int, children.read_text().split())
    os.kill(web, signal.SIGKILL)
    while True:
        now = [int(pid) for pid in children.read_text().split() if int(pid) != web]
        if now and daemon.log.read_text().count("metrics, status and the live page") == 2:
            break
        assert time.monotonic() < end
        time.sleep(0.05)
    while json.loads(daemon.kvkeep("status", "--json").stdout)["health"] != "ok":
        assert time.monotonic() < end
        time.sleep(0.05)
    while not ready(daemon.url()):  # the page follows a moment later
        assert time.monotonic() < end
        time.sleep(0.05)
    daemon.kill()
    while Path(f"/proc/{now[0]}").exists():
        assert time.monotonic() < end, "the web process outlives its daemon"
        time.sleep(0.05)


def test_the_page_of_an_earlier_run_is_not_shown_by_a_daemon_that_has_none(daemon):
    assert daemon.url()
    daemon.kill()
    daemon.argv[-1] = "-1"
    daemon.start()
    assert "http://" not in daemon.kvkeep("status").stdout


def test_doctor_judges_the_arena_of_the_running_daemon(daemon):
    done = daemon.kvkeep("doctor", "--json", "--name", daemon.name)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0
    assert "serves 0 clients" in found["daemon"]["message"]
    assert "MiB" in found["shm"]["message"]
    too_much = daemon.kvkeep("doctor", "--name", daemon.name, "--l1-size-gb", "4000")
    assert too_much.returncode == 1
    assert "error" in too_much.stdout
    assert "lower --l1-size-gb" in too_much.stdout


def test_a_second_daemon_of_that_name_is_refused_and_the_kill_of_the_first_lets_it_start(daemon):
    command = [sys.executable, "-m", "kvkeep.daemon.main", *daemon.argv]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, timeout=PATIENCE_S, check=False)
    assert done.returncode == 4
    assert "another" in done.stderr
    daemon.kill()
    daemon.start()
    assert json.loads(daemon.kvkeep("status", "--json").stdout)["epoch"] == 2


def test_a_daemon_that_was_killed_is_told_from_one_that_never_ran(daemon):
    daemon.kill()
    done = daemon.kvkeep("status")
    assert done.returncode == 3
    assert "no kvkeepd is running" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    never = kvkeep("--run-dir", "/tmp/kvk-test-never", "status")
    assert never.returncode == 3
    assert "does not exist" in never.stderr


def test_a_daemon_that_hangs_is_said_to_hang(daemon):
    daemon.process.send_signal(signal.SIGSTOP)
    done = daemon.kvkeep("status")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.kvkeep("status").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_outside_the_group_is_told_how_to_get_in(daemon):
    os.chmod(daemon.run_dir, 0o755)
    code = (
        "import os, sys\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
        "from kvkeep.daemon import reach\nprint(reach.look(sys.argv[1]).message)"
    )
    script = subprocess.run(
        [sys.executable, "-c", "from kvkeep.daemon import reach\n" + code, daemon.run_dir],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "is closed to" in script.stdout, script.stderr
    assert "become a member of group" in script.stdout


def test_a_run_directory_in_which_others_could_replace_the_sockets_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    command = [sys.executable, "-m", "kvkeep.daemon.main", "--name", "kvk-test-open", "--l1-size-gb", "0.01"]
    for run_dir in (open_to_all, open_to_all / "below"):
        done = subprocess.run(
            [*command, "--run-dir", str(run_dir)], capture_output=True, text=True, env=CLEAN, timeout=60, check=False
        )
        assert done.returncode == 3
        assert "chmod o-w" in done.stderr
    assert not Path("/dev/shm/kvkeep-kvk-test-open-meta").exists()
    assert kvkeep("doctor", "--run-dir", str(open_to_all)).returncode == 1


def test_a_run_directory_that_cannot_be_made_is_one_sentence_and_not_a_bug():
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep.daemon.main", "--run-dir", "/proc/kvkeep/x", "--l1-size-gb", "0.01"],
        capture_output=True,
        text=True,
        env=CLEAN,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 3
    assert "run directory /proc/kvkeep/x cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_environment_names_the_daemon_too(daemon):
    assert kvkeep("status", KVKEEP_RUN_DIR=daemon.run_dir).returncode == 0


def test_wrong_usage_is_status_2_and_one_line():
    for argv in (["status", "--jsom"], ["bench", "no-such"], ["--name", "UPPER", "status"]):
        done = kvkeep(*argv)
        assert done.returncode == 2, argv
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_daemon_without_l2_says_so_in_one_sentence(daemon):
    for argv in (["l2", "stat"], ["l2", "ls", "disk"]):
        done = kvkeep("--run-dir", str(daemon.run_dir), *argv)
        assert done.returncode == 2, argv
        assert done.stderr == "kvkeep: this daemon has no L2: start it with --l2-adapter to have one\n"


def test_bench_lists_what_there_is():
    assert kvkeep("bench").returncode == 0
