"""Fixtures that start real daemons, each with its own name and folder, and check that nothing is left behind."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_counter = itertools.count()


def unique_name(kind: str = "test") -> str:
    return f"kvk-{kind}-{os.getpid()}-{next(_counter)}"


class Daemon:
    """A real `kvkeepd` process.  `kill` is SIGKILL; `start` again adopts its arena."""

    def __init__(self, run_dir: Path, name: str, *flags: str, l1_mib: float = 64) -> None:
        self.run_dir, self.name = run_dir, name
        self.flags = [f"--l1-size-gb={l1_mib / 1024}", *flags]
        self.program = ["-m", "kvkeep.daemon.main"]
        self.log = run_dir.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, wait: bool = True) -> Daemon:
        command = [sys.executable, *self.program, "--name", self.name, "--run-dir", str(self.run_dir)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags, *more], stdout=log, stderr=log, cwd="/", env=environment
            )
        if wait:
            self.wait_ready()
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def wait_ready(self, deadline_s: float = 20.0) -> None:
        assert self.process is not None
        until = time.monotonic() + deadline_s
        mark = b" is ready: epoch "
        before = getattr(self, "_seen", 0)
        while time.monotonic() < until:
            text = self.log.read_bytes()
            if text.count(mark) > before:
                self._seen = text.count(mark)
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"kvkeepd did not start:\n{self.log.read_text()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self, deadline_s: float = 10.0) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def restart(self) -> None:
        self.kill()
        self.start()

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def remove(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for kind in ("meta", "data"):
            Path(f"/dev/shm/kvkeep-{self.name}-{kind}").unlink(missing_ok=True)


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., Daemon]]:
    """make_daemon(*flags, l1_mib=64, name=None, start=True) -> Daemon"""
    root = Path(tempfile.mkdtemp(prefix="kvk-"))
    daemons: list[Daemon] = []

    def make(*flags: str, l1_mib: float = 64, name: str | None = None, start: bool = True) -> Daemon:
        name = name or unique_name()
        daemon = Daemon(root / name, name, *flags, l1_mib=l1_mib)
        daemons.append(daemon)
        return daemon.start() if start else daemon

    yield make
    for daemon in daemons:
        daemon.remove()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon with 64 MiB of L1."""
    return make_daemon()


@pytest.fixture
def seed() -> int:
    """Of a random test; printed with a failure.  KVKEEP_TEST_SEED repeats one."""
    value = int(os.environ.get("KVKEEP_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"KVKEEP_TEST_SEED={value}")
    return value
