"""Children: restarted when they die or hang, gone when the daemon is gone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.daemon import supervise
from kvkeep.daemon.supervise import Child, State

PATIENCE_S = 30.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which a module of the test's making can be started as kvkeep.daemon._test_child."""
    package = tmp_path / "site"
    package.mkdir()
    (package / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import importlib.util, os, sys
            path = os.path.join(os.path.dirname(__file__), "child_under_test.py")
            if os.path.exists(path):
                spec = importlib.util.spec_from_file_location("kvkeep.test_child", path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules["kvkeep.test_child"] = module
            """
        )
    )
    return {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture
def make(environ: dict[str, str], tmp_path: Path) -> Iterator[object]:
    made: list[Child] = []

    def child(code: str, *argv: str, **kwargs: object) -> Child:
        (tmp_path / "site" / "child_under_test.py").write_text(textwrap.dedent(code))
        made.append(Child("thing", ["kvkeep.test_child", *argv], environ, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield child
    for one in made:
        one.stop(time.monotonic())
        one.close()


SLEEPER = """
    import time
    def main(argv, beat):
        open(argv[0], "a").write("started\\n")
        while True:
            beat()
            time.sleep(0.05)
"""

STUBBORN = """
    import signal, time
    def main(argv, beat):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(argv[0], "a").write("started\\n")
        time.sleep(600)
"""


def turn(child: Child, until: object) -> None:
    """The owner's loop, as control runs it, until ``until()``."""
    end = time.monotonic() + PATIENCE_S
    while not until():  # type: ignore[operator]
        now = time.monotonic()
        assert now < end, "the child did not come so far"
        deadline = child.next_deadline()
        wait = 0.1 if deadline is None else max(0.0, min(0.1, deadline - now))
        if select.select([child.fileno()], [], [], wait)[0]:
            child.on_exit()
        child.tick(time.monotonic())


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_child_is_restarted_and_its_end_is_a_reason_meanwhile(make, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "BACKOFF_FIRST_S", 0.5)
    log = tmp_path / "log"
    child = make(SLEEPER, str(log))
    child.start()
    fd = child.fileno()
    turn(child, lambda: lines(log) == 1)
    assert child.reasons() == []
    os.kill(child.pid, signal.SIGKILL)
    turn(child, lambda: child.state is State.WAITING)
    assert "killed by signal 9" in child.reasons()[0]
    turn(child, lambda: lines(log) == 2)
    assert child.reasons() == []
    assert child.restarts == 1
    assert child.fileno() == fd


def test_a_child_that_keeps_dying_is_restarted_ever_more_slowly_and_stays_a_reason(make, monkeypatch):
    monkeypatch.setattr(supervise, "BACKOFF_FIRST_S", 0.01)
    child = make("def main(argv, beat):\n    return 3\n")
    delays: list[float] = []
    child.start()
    for _ in range(4):
        turn(child, lambda: child.state is State.WAITING)
        deadline = child.next_deadline()
        assert deadline is not None
        delays.append(deadline - time.monotonic())
        turn(child, lambda: child.state is State.RUNNING)
    assert delays[-1] > delays[0]
    assert "ended with status 3" in child.reasons()[0]


def test_a_child_that_no_longer_beats_is_killed_and_restarted(make, tmp_path):
    log = tmp_path / "log"
    child = make(SLEEPER, str(log), heartbeat_s=5.0)
    child.start()
    turn(child, lambda: lines(log) == 1)
    os.kill(child.pid, signal.SIGSTOP)
    turn(child, lambda: lines(log) == 2)
    assert child.restarts == 1


def test_a_stopped_child_is_gone_and_stays_gone(make, tmp_path):
    log = tmp_path / "log"
    child = make(SLEEPER, str(log))
    child.start()
    turn(child, lambda: lines(log) == 1)
    pid = child.pid
    child.stop(time.monotonic() + PATIENCE_S)
    assert gone(pid)
    assert child.state is State.STOPPED
    assert child.next_deadline() is None


def test_a_child_that_ignores_the_request_to_stop_is_killed_at_the_deadline(make, tmp_path):
    log = tmp_path / "log"
    child = make(STUBBORN, str(log))
    child.start()
    turn(child, lambda: lines(log) == 1)
    pid = child.pid
    child.stop(time.monotonic() + 0.2)
    assert gone(pid)


def test_a_child_that_cannot_be_started_is_a_reason_and_not_an_error(make, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    child = make("")
    child.start()
    assert "cannot be started" in child.reasons()[0]


def test_only_modules_of_ours_can_be_children(environ):
    child = Child("thing", ["os", "system"], environ)
    child.start()
    turn(child, lambda: child.state is State.WAITING)
    child.stop(time.monotonic())
    child.close()


def test_a_child_leaves_no_descriptor_open_however_often_it_is_restarted(make, monkeypatch):
    monkeypatch.setattr(supervise, "BACKOFF_FIRST_S", 0.001)
    child = make("def main(argv, beat):\n    return 1\n")
    child.start()
    turn(child, lambda: child.restarts == 1)
    before = len(os.listdir("/proc/self/fd"))
    turn(child, lambda: child.restarts == 4)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_killed_parent_leaves_no_child(environ, tmp_path):
    log = tmp_path / "log"
    (tmp_path / "site" / "child_under_test.py").write_text(textwrap.dedent(SLEEPER))
    code = (
        "import sys, time\nfrom kvkeep.daemon.supervise import Child\n"
        f"c = Child('thing', ['kvkeep.test_child', {str(log)!r}])\nc.start()\n"
        "print(c.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    end = time.monotonic() + PATIENCE_S
    while lines(log) == 0 and time.monotonic() < end:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while not gone(pid):
        assert time.monotonic() < end, "the child lives on"
        time.sleep(0.02)
