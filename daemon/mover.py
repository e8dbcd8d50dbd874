"""The process of one L2 adapter: reads its arguments, sets up the log, makes the adapter, and lets the mover run.

The adapter is made here and not in control: what a third party wrote, and what a medium does, stays in this process.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Sequence

from kvkeep.daemon import logs
from kvkeep.l2 import jobs
from kvkeep.l2.adapter import AdapterError
from kvkeep.l2.mover import THREADS, Mover
from kvkeep.l2.registry import create_adapter
from kvkeep.l2.serde import chain_of
from kvkeep.l2.serde_codec import Codec


def main(argv: Sequence[str], beat: Callable[[], None]) -> int:
    beat()
    parser = argparse.ArgumentParser(prog="kvkeep.daemon.mover")
    for name in ("--name", "--config", "--log-level", "--log-format"):
        parser.add_argument(name, required=True)
    for name in ("--channel-fd", "--data-fd", "--data-bytes"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(argv)
    logs.setup(options.log_level, options.log_format)
    channel = socket.socket(fileno=options.channel_fd)
    config = json.loads(options.config)
    threads = int(config.pop("threads", THREADS))
    try:
        adapter = create_adapter(config)
        chain = chain_of(config)
        if chain and not adapter.keeps_encodings:
            raise AdapterError(f"the adapter '{adapter.type_name}' keeps plain bytes only: leave out 'serde'")
    except AdapterError as problem:
        channel.send(jobs.encode(jobs.Failed(str(problem)[:1000])))
        return 1
    mover = Mover(options.name, adapter, channel, options.data_fd, options.data_bytes, Codec(chain))
    return mover.run(beat, threads)
