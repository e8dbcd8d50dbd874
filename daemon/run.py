"""A run of the daemon: lock, open or adopt, bind, say ready, loop, stop.

    run(config)   the run directory's lock -> the arena's segments -> Control -> children -> READY -> loop -> stop

Both locks are flocks, which a kill releases.  What a stop leaves is what a kill leaves: the two segments.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import time

from kvkeep.daemon.config import Config
from kvkeep.daemon.control import Control, geometry_of
from kvkeep.daemon.latency import ask_for_short_slices
from kvkeep.daemon.supervise import Child
from kvkeep.daemon.web import QUOTAS_VARIABLE
from kvkeep.shm.segments import InUse, SegmentError, open_segments

log = logging.getLogger("kvkeep.run")

EXIT_HOST = 3  # as in main
EXIT_TAKEN = 4
CHILD_STOP_S = 2.0
WEB_HEARTBEAT_S = 20.0
GATEWAY_HEARTBEAT_S = 20.0


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT.  Returns the exit code."""
    try:
        os.makedirs(config.run_dir, mode=0o755, exist_ok=True)
        lock = os.open(config.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        log.error(
            "the run directory %s cannot be used (%s: %s); make it writable for uid %d, or give another --run-dir",
            config.run_dir,
            e.filename,
            e.strerror,
            os.geteuid(),
        )
        return EXIT_HOST
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.error("another kvkeepd runs in %s; stop it, or give this one another --name or --run-dir", config.run_dir)
        return EXIT_TAKEN
    try:
        segments = open_segments(config.name, geometry_of(config), forget=config.forget)
    except InUse as e:
        log.error("%s", e)
        return EXIT_TAKEN
    except SegmentError as e:
        log.error("%s", e)
        return EXIT_HOST
    if segments.why:
        log.warning("the arena of an earlier start was dropped: %s", segments.why)
    for name in ("http.url", "lmcache.url"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(config.run_dir, name))  # of an earlier run
    ask_for_short_slices()
    control = Control(config, segments, _version())
    if segments.fully_reserved and not (config.l1_mlock or config.l1_use_hugepages):
        control.memory_is_ready()
    gc.collect()
    gc.freeze()  # what lives now lives to the end; later collections need not look at it
    with _Signals(control):
        if control.arena.reserving:
            control.reserve_first()
            control.reserver.start()
        children = [_start_web(control)] if config.http_port >= 0 else []
        if config.port >= 0:
            children.append(_start_gateway(control))
        for child in children:
            supervise(control, child)
        if control.l2 is not None:
            control.l2.start()
        control.notifier.ready("serving; reserving memory")
        _arm_watchdog(control)
        log.info(
            "kvkeepd %r is ready: epoch %d, %d MiB of L1, attach at %s",
            config.name,
            control.epoch,
            segments.geometry.data_bytes >> 20,
            config.attach_path,
        )
        control.loop()
        control.notifier.stopping()
        control.close_sockets()
        if control.l2 is not None:
            if not control.exit_code:
                control.l2.drain(config.l2_drain_seconds, lambda: control.stop_requests > 1)
            control.l2.stop()
        for child in children:
            child.stop(time.monotonic() + CHILD_STOP_S)
    control.close()
    log.info("stopped; the arena %s", "was dropped" if control.exit_code else "stays in memory for the next start")
    return control.exit_code


class _Signals:
    """SIGTERM and SIGINT end the loop, by way of a descriptor that it polls."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def __enter__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._control.watch(self._read.fileno(), self._drain)

    def _stop(self, number: int, _: object) -> None:
        self._control.stopping = True
        self._control.stop_requests += 1  # a second one ends the draining of L2

    def _drain(self) -> None:
        try:
            self._read.recv(4096)
        except BlockingIOError:
            pass

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        self._control.unwatch(self._read.fileno())
        self._read.close()
        self._write.close()


def _arm_watchdog(control: Control) -> None:
    interval = control.notifier.watchdog_interval()
    if not interval:
        return
    last = 0.0

    def beat(now: float) -> float:
        nonlocal last
        if now - last >= interval / 3:
            control.notifier.watchdog()
            last = now
        return last + interval / 3

    control.timers.append(beat)


def _start_web(control: Control) -> Child:
    config = control.config
    # Opened anew, read-only: the child must not share the descriptor that carries our lock on the arena.
    meta_fd = os.open(f"/proc/self/fd/{control.segments.meta_fd}", os.O_RDONLY | os.O_CLOEXEC)
    options = {
        "--stats-fd": meta_fd,
        "--host": config.http_host,
        "--port": config.http_port,
        "--url-file": os.path.join(config.run_dir, "http.url"),
        "--run-dir": config.run_dir,
        "--chunk-size": config.chunk_size,
        "--eviction-policy": config.eviction_policy,
        "--l2-prefetch-policy": config.l2_prefetch_policy,
        "--admin-uids": list(config.admin_uids),
        "--log-level": config.log_level,
        "--log-format": config.log_format,
    }
    argv = ["kvkeep.daemon.web", *(str(word) for option in options.items() for word in option)]
    env = {**os.environ, QUOTAS_VARIABLE: config.tenant_quotas}
    return Child("web", argv, env, pass_fds=(meta_fd,), heartbeat_s=WEB_HEARTBEAT_S)


def _start_gateway(control: Control) -> Child:
    config = control.config
    options = {
        "--run-dir": config.run_dir,
        "--segment": f"/dev/shm/kvkeep-{config.name}-data",
        "--host": config.host,
        "--port": config.port,
        "--chunk-size": config.chunk_size,
        "--log-level": config.log_level,
        "--log-format": config.log_format,
    }
    argv = ["kvkeep.daemon.lmcache_gateway", *(str(word) for option in options.items() for word in option)]
    child = Child("lmcache", argv, heartbeat_s=GATEWAY_HEARTBEAT_S)
    control.gateway_pid = lambda: child.pid
    return child


def supervise(control: Control, child: Child) -> None:
    """Start the child and have the loop look after it: its state is part of our health."""

    def report() -> None:
        control.changed()
        if reasons := child.reasons():
            control.admin.reasons[child.name] = "; ".join(reasons)
        else:
            control.admin.reasons.pop(child.name, None)

    def moved() -> None:
        child.on_exit()
        report()

    def tick(now: float) -> float | None:
        deadline = child.next_deadline()
        if deadline is not None and now >= deadline:
            child.tick(now)
            report()
            deadline = child.next_deadline()
        return deadline

    child.start()
    control.watch(child.fileno(), moved)
    control.timers.append(tick)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvkeep")
    except PackageNotFoundError:
        return "unknown"
