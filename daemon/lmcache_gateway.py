"""The process that serves connectors of LMCache: a child of kvkeepd, and a client of it like any other."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvkeep.daemon import logs
from kvkeep.ipc.client import Client
from kvkeep.ipc.lmcache.gateway import IDLE_MS, Gateway, Router
from kvkeep.shm.leases import EXTERNAL_NAME

log = logging.getLogger("kvkeep.lmcache")


def main(argv: Sequence[str], beat: Callable[[], None]) -> int:
    parser = argparse.ArgumentParser(prog="kvkeep-lmcache", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--segment", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunk-size", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    options = parser.parse_args(argv)
    logs.setup(options.log_level, options.log_format)
    if not options.segment.exists():
        log.error("workers of LMCache map L1 by its name, and %s is not there", options.segment)
        return 1
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    client = Client.attach(options.run_dir, name=EXTERNAL_NAME, wait=False)
    gateway = Gateway(client, options.chunk_size, options.segment, options.run_dir / "lmcache-workers.json")
    context: zmq.Context[Any] = zmq.Context()
    host = "127.0.0.1" if options.host == "localhost" else options.host
    try:
        router = Router(host, options.port, gateway, context)
    except zmq.ZMQError as error:
        log.error("LMCache's port %s:%d cannot be bound (%s); choose another --port", host, options.port, error)
        return 1
    fresh = options.run_dir / "lmcache.url.new"
    fresh.write_text(router.address + "\n")
    fresh.rename(options.run_dir / "lmcache.url")
    log.info("connectors of LMCache attach at %s", router.address)
    poller = zmq.Poller()
    for one in (router.socket, router.monitor, client.eventfd):
        poller.register(one, zmq.POLLIN)
    while not stopping:
        beat()
        due = gateway.upkeep()
        ready = dict(poller.poll(min(IDLE_MS, round(due * 1000) + 1)))
        if client.eventfd in ready:
            _drain(client.eventfd)
        router.look_at_ends()
        if router.socket in ready:
            router.serve()
    client.close()
    context.destroy(linger=0)
    return 0


def _drain(eventfd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(eventfd)
