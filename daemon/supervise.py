"""A child process that is started, watched, restarted with backoff, and stopped in order.

    STOPPED --start--> RUNNING --exit--> WAITING --backoff over--> RUNNING
                          |                 |
                          +------stop-------+--> STOPPED

The owner's poll loop adds `fileno` once (it stays the same over restarts), calls `on_exit` when it is readable, and
`tick` no later than `next_deadline`.  None of these blocks.  `stop` waits until its deadline and belongs to the end.

A child is told apart by its pidfd, so a reused pid can never be signalled.  It dies with its parent (see child).  With
``heartbeat_s`` it must also show that its loop turns; one that does not is killed, and restarted as if it had crashed.
"""

from __future__ import annotations

import enum
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 30.0
HEALTHY_AFTER_S = 30.0  # a run of this length makes the next failure a first one again
FLAPPING_FAILURES = 3  # so many failures in a row are a reason even while it runs

log = logging.getLogger("kvkeep.supervise")


class State(enum.Enum):
    STOPPED = "stopped"
    RUNNING = "running"
    WAITING = "waiting to be restarted"


class Child:
    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        pass_fds: Sequence[int] = (),
        heartbeat_s: float = 0.0,
    ) -> None:
        """``argv`` is a module of ours that has ``main(argv, beat)``, and its arguments.  ``pass_fds`` must stay open
        here as long as the child may be restarted.  ``heartbeat_s`` 0 = it need not show that it lives."""
        self.name = name
        self.state = State.STOPPED
        self.restarts = 0
        self._argv = list(argv)
        self._env = {k: v for k, v in (os.environ if env is None else env).items() if k not in _NOT_FOR_CHILDREN}
        self._pass_fds = tuple(pass_fds)
        self._heartbeat_s = heartbeat_s
        self._epoll = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._heart = -1  # our end of the pipe on which the child beats
        self._started = self._heard = 0.0
        self._retry_at = 0.0
        self._failures = 0
        self._last_failure = ""

    # ---- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start now.  A failure to start is a failure like any other: logged, retried, never raised."""
        if self.state is not State.RUNNING:
            self._launch(time.monotonic())

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def fileno(self) -> int:
        """Of an epoll that holds whatever there is to watch at the moment."""
        return self._epoll.fileno()

    def on_exit(self) -> None:
        """Something happened on `fileno`: a heartbeat, or the end of the child."""
        now = time.monotonic()
        self._listen(now)
        if self._process is not None and self._process.poll() is not None:
            self._reap(now)

    def next_deadline(self) -> float | None:
        """When `tick` must be called, in `time.monotonic` seconds."""
        if self.state is State.WAITING:
            return self._retry_at
        if self.state is State.RUNNING and self._heartbeat_s:
            return self._heard + self._heartbeat_s
        return None

    def tick(self, now: float) -> None:
        if self.state is State.WAITING and now >= self._retry_at:
            self.restarts += 1
            self._launch(now)
        elif self.state is State.RUNNING and self._heartbeat_s and now >= self._heard + self._heartbeat_s:
            self._listen(now)  # beats that came while this process itself was held up count
            if now >= self._heard + self._heartbeat_s:
                log.warning("%s has not moved for %.0f s: killed", self.name, now - self._heard)
                self._signal(signal.SIGKILL)
                self._heard = now  # its end comes by on_exit

    def proved(self) -> None:
        """It came up and can do its work: if it fails again, it is not kept waiting for long."""
        self._failures = min(self._failures, FLAPPING_FAILURES)

    def reasons(self) -> list[str]:
        """Why health is degraded; empty when all is well."""
        if self.state is State.WAITING:
            return [f"{self.name}: {self._last_failure}, restart is under way"]
        if self.state is State.RUNNING and self._failures >= FLAPPING_FAILURES and not self._settled(time.monotonic()):
            return [f"{self.name}: restarted after {self._failures} failures in a row, the last: {self._last_failure}"]
        return []

    def terminate(self) -> None:
        """Ask it to end, without waiting; it will not be restarted."""
        if self.state is State.RUNNING:
            self._signal(signal.SIGTERM)
        self.state = State.STOPPED

    def renew(self) -> None:
        """Ask it to end, without waiting; it is restarted as if it had failed."""
        if self.state is State.RUNNING:
            self._signal(signal.SIGTERM)

    def stop(self, deadline: float) -> None:
        """End it: SIGTERM, and SIGKILL at ``deadline`` (`time.monotonic`).  Returns when it is gone and reaped."""
        self.terminate()
        if self._process is not None:
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not stop in time: killed", self.name)
                self._signal(signal.SIGKILL)
                self._process.wait()
        self._forget()

    def close(self) -> None:
        self._forget()
        self._epoll.close()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _launch(self, now: float) -> None:
        heart, beat = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        command = [sys.executable, "-m", "kvkeep.daemon.child", str(os.getpid()), str(beat), *self._argv]
        try:
            self._process = subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, pass_fds=(*self._pass_fds, beat)
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as problem:
            os.close(heart)
            if self._process is not None and self._pidfd < 0:  # started, but cannot be watched
                self._process.kill()
                self._process.wait()
                self._process = None
            self._failed(now, f"cannot be started ({problem.strerror})")
            return
        finally:
            os.close(beat)
        self._heart = heart
        self._epoll.register(self._pidfd, select.EPOLLIN)
        self._epoll.register(self._heart, select.EPOLLIN)
        self._started = self._heard = now
        self.state = State.RUNNING
        log.debug("%s started, pid %d", self.name, self._process.pid)

    def _listen(self, now: float) -> None:
        if self._heart < 0:
            return
        try:
            beats = os.read(self._heart, 65536)
        except BlockingIOError:
            return
        if beats:
            self._heard = now
        else:  # it closed its end: nothing more to hear, and an endless readable event if we kept it
            self._epoll.unregister(self._heart)
            os.close(self._heart)
            self._heart = -1

    def _reap(self, now: float) -> None:
        assert self._process is not None
        code = self._process.returncode
        self._forget()
        if self.state is not State.RUNNING:
            return
        if self._settled(now):
            self._failures = 0
        self._failed(now, f"killed by signal {-code}" if code < 0 else f"ended with status {code}")

    def _failed(self, now: float, what: str) -> None:
        self._failures += 1
        self._last_failure = what
        delay = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures - 1, 20))
        self._retry_at = now + delay
        self.state = State.WAITING
        log.warning("%s %s: restart in %.1f s", self.name, what, delay)

    def _settled(self, now: float) -> bool:
        return now - self._started >= HEALTHY_AFTER_S

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except OSError:
            pass  # it ended just now

    def _forget(self) -> None:
        """Close what belonged to a child that has ended."""
        for fd in (self._pidfd, self._heart):
            if fd >= 0:
                os.close(fd)  # leaves the epoll by itself
        self._pidfd = self._heart = -1
        self._process = None


# Our service manager talks to the daemon only, and its settings are not the child's.
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
