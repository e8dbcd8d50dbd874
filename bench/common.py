"""What every benchmark shares: its own real daemon, the percentiles, and how a result is printed.

A benchmark never touches a daemon that was there before.  It starts `kvkeepd` under a unique name in a temporary run
directory, and takes away process, segments and directory again whatever happens, Ctrl-C and SIGTERM included (after a
SIGKILL of the benchmark itself, two segments named ``/dev/shm/kvkeep-bench-…`` are left to remove by hand).

A `Case` is one line of the result: a value measured in this run, beside a reference measured in this run, interleaved
with it so that both saw the same machine.  ``bar`` is what the project asks of ``ratio``, or of ``value`` where the
reference is not what the bar is about; it is printed, not enforced.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import AttachRefused, Unavailable

START_S = 30.0
STOP_S = 10.0
SPARE_BYTES = 64 << 20
RESERVE_BYTES = 512 << 20  # memory that is not ours to take
DEFAULT_SEED = 20261130
_counter = itertools.count()


class BenchError(Exception):
    """The benchmark cannot go on; one sentence."""


# ---- arguments and output --------------------------------------------------------------------------------------------


def arguments(name: str, doc: str, argv: Sequence[str] | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"kvkeep bench {name}", description=doc.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, one a case")
    parser.add_argument("--quick", action="store_true", help="a tiny form: shows that it works, measures nothing")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of hashes and choices (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains this")
    for flag, options in more:
        parser.add_argument(flag, **options)
    return parser.parse_args(argv)


class Report:
    """Prints each case when it is known: a row of a table, or one line of JSON."""

    def __init__(self, args: argparse.Namespace, title: str) -> None:
        self._json, self._seed = args.json, args.seed
        self.failures = 0
        self._head = False
        self._title = title
        self._reference = ""

    def wanted(self, args: argparse.Namespace, *names: str) -> bool:
        """Whether ``--only`` lets one of these through."""
        return any(args.only in name for name in names)

    def case(
        self,
        case: str,
        value: float | None,
        unit: str,
        *,
        reference: float | None = None,
        reference_name: str = "",
        bar: str = "",
        **fields: Any,
    ) -> None:
        """``bar`` is ``"ratio <= 5"``, ``"value >= 0.5"`` …"""
        ratio = value / reference if value is not None and reference else None
        line = {
            "case": case,
            "value": _short(value),
            "unit": unit,
            "reference": _short(reference),
            "reference_name": reference_name,
            "ratio": _short(ratio),
        }
        if bar:
            line |= {"bar": bar, "ok": _holds(bar, value, ratio)}
        line |= {name: _short(field) for name, field in fields.items()} | {"seed": self._seed}
        if self._json:
            print(json.dumps(line), flush=True)
        else:
            self._row(line)

    def missing(self, case: str, unit: str, why: str) -> None:
        """A case that this machine does not allow: said, not left out."""
        self.case(case, None, unit, not_measured=why)

    def failed(self, case: str, unit: str, why: str) -> None:
        """A case whose figures would not mean what they say: said instead of them."""
        self.failures += 1
        self.case(case, None, unit, failed=why)

    def note(self, text: str) -> None:
        """For people: what is going on.  Not part of the result."""
        if not self._json and sys.stderr.isatty():
            print(f"  {text} …", file=sys.stderr, flush=True)

    def _row(self, line: dict[str, Any]) -> None:
        if not self._head:
            self._head = True
            print(f"{self._title}\n{machine()}\n")
            print(f"{'case':<30}{'value':>11} {'unit':<9}{'p99':>10}{'reference':>11}{'ratio':>8}  bar")
        if line["value"] is None:
            why = f"FAILED: {line['failed']}" if "failed" in line else f"not measured: {line.get('not_measured', '')}"
            print(f"{line['case']:<30}{why}", flush=True)
            return
        bar = f"{line['bar']} {'holds' if line['ok'] else 'MISSED'}" if "bar" in line else ""
        cells = (_cell(line[k]) if k in line else "" for k in ("p99", "reference", "ratio"))
        p99, reference, ratio = cells
        print(
            f"{line['case']:<30}{_cell(line['value']):>11} {line['unit']:<9}{p99:>10}{reference:>11}{ratio:>8}  {bar}"
        )
        known = ("case", "value", "unit", "p99", "reference", "reference_name", "ratio", "bar", "ok", "seed")
        rest = [f"{k} {v}" for k, v in line.items() if k not in known and v not in (None, "")]
        if line["reference_name"] != self._reference:
            self._reference = line["reference_name"]
            rest[:0] = [f"reference: {self._reference}"] if self._reference else []
        print(f"    {', '.join(rest)}", flush=True)


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float | np.floating) else value


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10000 else f"{value:.0f}"


def _holds(bar: str, value: float | None, ratio: float | None) -> bool | None:
    what, sign, limit = bar.split()[:3]
    measured = ratio if what == "ratio" else value
    if measured is None:
        return None
    return measured <= float(limit) if sign == "<=" else measured >= float(limit)


def machine() -> str:
    """What it ran on, in one line."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")
    load = os.getloadavg()[0]
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{model}, {os.cpu_count()} CPUs, Linux {os.uname().release}, Python {python}, load {load:.1f} at the start"


def percentiles(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, float]:
    """(p50, p99)."""
    p50, p99 = np.percentile(np.asarray(values), (50, 99))
    return float(p50), float(p99)


# ---- the daemon ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C does, so that context managers clean up."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Daemon:
    """A real `kvkeepd` of the benchmark's own.  Context manager; `kill` and `start` again adopts the arena."""

    def __init__(self, l1_bytes: int, *flags: str) -> None:
        self.name = f"bench-{os.getpid()}-{next(_counter)}"
        self.l1_bytes = l1_bytes
        self._flags = (f"--l1-size-gb={l1_bytes / (1 << 30)!r}", *flags)
        self._root = Path(tempfile.mkdtemp(prefix="kvkeep-bench-"))
        self.run_dir = self._root / "run"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Starts the process, waits for nothing.  Returns the moment before the exec (time.monotonic)."""
        command = [sys.executable, "-m", "kvkeep.daemon.main", "--name", self.name, "--run-dir", str(self.run_dir)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
        with (self._root / "log").open("ab") as log:
            began = time.monotonic()
            self.process = subprocess.Popen(
                [*command, *self._flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment
            )
        return began

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def attach(self, name: str = "bench", *, arena: bool = True) -> Client:
        """A client, as soon as the daemon lets one in: the socket is watched closely, the backoff is not measured."""
        until = time.monotonic() + START_S
        socket = self.run_dir / "attach.sock"
        problem = ""
        while time.monotonic() < until:
            self.must_run()
            if socket.exists():
                try:
                    client = Client.attach(self.run_dir, name=name, deadline_s=START_S, arena=arena)
                    client.ping()
                    return client
                except (Unavailable, AttachRefused) as error:
                    problem = str(error)
            time.sleep(0.001)
        raise BenchError(f"kvkeepd let nobody in for {START_S:g} s: {problem or self.log()}")

    def must_run(self) -> None:
        if self.process is None or self.process.poll() is not None:
            raise BenchError(f"kvkeepd ended: {self.log()}")

    def wait_reserved(self, client: Client) -> None:
        """Until the whole arena is real memory."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            document = client.stats()
            if document["reasons"]:
                raise BenchError("; ".join(document["reasons"]))
            if document["l1"]["bytes_ready"] >= document["l1"]["bytes_total"]:
                return
            time.sleep(0.02)
        raise BenchError("the arena was not reserved within 120 s")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_S)

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return (self._root / "log").read_text(errors="replace")[-2000:]
        return ""

    def remove(self) -> None:
        self.kill()
        for kind in ("meta", "data"):
            Path(f"/dev/shm/kvkeep-{self.name}-{kind}").unlink(missing_ok=True)
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def require_memory(need: int) -> str:
    """ "" if this many bytes of shared memory can be had with a margin, else the sentence that says what is missing."""
    there = os.statvfs("/dev/shm")
    free = there.f_bavail * there.f_frsize
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    have = min(free, available - RESERVE_BYTES)
    return (
        ""
        if have >= need
        else f"needs {need / 2**30:.1f} GiB free in /dev/shm and memory, there are {have / 2**30:.1f}"
    )


def run(name: str, body: Any, args: argparse.Namespace) -> int:
    """``body(args)``, with its errors as one sentence."""
    try:
        with interruptible():
            body(args)
    except BenchError as problem:
        print(f"kvkeep bench {name}: {problem}", file=sys.stderr)
        return 1
    return 0
