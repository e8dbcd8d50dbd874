"""The long forms, for as long as you like:  python -m tests.faults.soak NAME --minutes M --seed S

    daemon-killed    SIGKILL and restart of the daemon under clients that work
    worker-killed    SIGKILL of workers, each state in turn
    hostile          fuzzers on both sockets
    oracle           many clients over three times the arena's size
    startup          SIGKILL of a starting daemon
    l2-killed        SIGKILL of movers and daemons; L2 has all that it acknowledged (fs and raw_block in turn)
    l2-evicting      the same with media that are far too small
    l2-matrix        every case of the fault matrix, with real stalls
    l2-replay        the same prompts a hundred times; nothing is written after the first pass
    l2-evict         both levels within their limits under three times what fits
    l2-reboot        two gigabytes, L1 lost, everything comes back; the next medium and serde in each round

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
from tests.faults import (
    test_daemon_killed,
    test_hostile,
    test_l2_killed,
    test_l2_matrix,
    test_l2_soak,
    test_oracle,
    test_startup,
    test_worker_killed,
)


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


def l2_killed(daemon: Daemon, rng: random.Random) -> object:
    return test_l2_killed.kill_under_load(daemon, _medium(daemon), rng.choice(["fs", "raw_block"]), rng, 20)


def l2_evicting(daemon: Daemon, rng: random.Random) -> object:
    return test_l2_killed.kill_while_evicting(daemon, _medium(daemon), rng, 20)


def l2_matrix(daemon: Daemon, rng: random.Random) -> object:
    """A case that needs a file system of its own is left to the test."""
    case = rng.choice([case for case in test_l2_matrix.CASES if not case.disk])
    test_l2_matrix.endure(daemon, _medium(daemon), case, patient=True)
    return case.name


def l2_replay(daemon: Daemon, rng: random.Random) -> object:
    return test_l2_soak.replay(daemon, _medium(daemon), rng, 100)


def l2_evict(daemon: Daemon, rng: random.Random) -> object:
    return test_l2_soak.evict_for(daemon, _medium(daemon), rng, 300, 8 << 20)


def l2_reboot(daemon: Daemon, rng: random.Random) -> object:
    medium, serde = rng.choice(["fs", "raw", "both"]), rng.choice(test_l2_soak.SERDES)
    done = test_l2_soak.reboots(daemon, _medium(daemon), medium, serde, 1920)
    return {"medium": medium, "serde": serde, **done}


def _medium(daemon: Daemon) -> Path:
    """A folder beside the run directory, which is removed with it after the round."""
    path = daemon.run_dir.parent / "media"
    path.mkdir()
    return path


ROUNDS: dict[str, tuple[Callable[[Daemon, random.Random], object], float]] = {
    "daemon-killed": (daemon_killed, 128),
    "worker-killed": (worker_killed, 192),
    "hostile": (hostile, 64),
    "oracle": (oracle, test_oracle.ARENA_MIB),
    "startup": (startup, 256),
    "l2-killed": (l2_killed, 16),
    "l2-evicting": (l2_evicting, 16),
    "l2-matrix": (l2_matrix, 64),
    "l2-replay": (l2_replay, 64),
    "l2-evict": (l2_evict, 16),
    "l2-reboot": (l2_reboot, 384),
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
