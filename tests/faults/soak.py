"""The long forms, for as long as you like:  python -m tests.faults.soak NAME --minutes M --seed S

    daemon-killed    SIGKILL and restart of the daemon under clients that work
    worker-killed    SIGKILL of workers, each state in turn
    hostile          fuzzers on both sockets
    oracle           many clients over three times the arena's size
    startup          SIGKILL of a starting daemon

Runs rounds until the time is over, each from a seed that is printed; stops at the first failure.  `make soak` runs the
fixed long forms that are marked ``soak`` in the test modules.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Daemon, unique_name
from tests.faults import test_daemon_killed, test_hostile, test_oracle, test_startup, test_worker_killed


def daemon_killed(daemon: Daemon, rng: random.Random) -> object:
    return test_daemon_killed.kill_under_load(daemon.start(), rng, 20, clients=4)


def worker_killed(daemon: Daemon, rng: random.Random) -> object:
    watch = test_worker_killed.Watch(daemon.start())
    for state in test_worker_killed.STATES:
        test_worker_killed.kill_in(watch, state, 20, rng.getrandbits(32))
    watch.finish()
    return {"killed": 20 * len(test_worker_killed.STATES)}


def hostile(daemon: Daemon, rng: random.Random) -> object:
    daemon.flags += ["--socket-mode", "0666"]
    daemon.run_dir.parent.chmod(0o755)
    test_hostile.fuzz(daemon.start(), rng, 30)
    return "harmless"


def oracle(daemon: Daemon, rng: random.Random) -> object:
    return test_oracle.oracle(daemon.start(), rng.getrandbits(32), 60, clients=9)


def startup(daemon: Daemon, rng: random.Random) -> object:
    test_startup.killed_while_starting(daemon, rng, 30)
    return {"killed": 30}


ROUNDS: dict[str, tuple[Callable[[Daemon, random.Random], object], float]] = {
    "daemon-killed": (daemon_killed, 128),
    "worker-killed": (worker_killed, 192),
    "hostile": (hostile, 64),
    "oracle": (oracle, test_oracle.ARENA_MIB),
    "startup": (startup, 256),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=ROUNDS)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    args = parser.parse_args()
    run, l1_mib = ROUNDS[args.name]
    until, number = time.monotonic() + args.minutes * 60, 0
    while time.monotonic() < until:
        seed = args.seed + number
        print(f"round {number}: --seed {seed}", flush=True)
        root = Path(tempfile.mkdtemp(prefix="kvk-soak-"))
        name = unique_name("soak")
        daemon = Daemon(root / name, name, l1_mib=l1_mib)
        try:
            print(run(daemon, random.Random(seed)), flush=True)
        except BaseException:
            print(f"FAILED with --seed {seed}; the daemon said:\n{daemon.output()[-5000:]}", flush=True)
            raise
        finally:
            daemon.remove()
            shutil.rmtree(root, ignore_errors=True)
        number += 1
    print(f"{number} rounds of {args.name} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
