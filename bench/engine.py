"""What a cache costs and saves a vLLM engine: no connector, kvkeep, LMCache, in turns, on the CPU.

    miss/<tokens>                every prompt new, one after the other: seconds a round, beside an engine without a
                                 connector.  ``until_stored_ratio``: until nothing is left to store
    miss/<tokens>/lmcache        the same figure beside LMCache's
    hit/<tokens>[/lmcache]       the prompts again, vLLM's own prefix cache reset before: all from the external cache
    hit_together/…               the same, all prompts of the round at once
    scheduler/miss|hit/<tokens>  milliseconds of the scheduler's thread in the connector's scheduler half, a request
    decode_messages              messages to the cache in a step that only decodes (pings, sent by the clock, apart)
    idle_cpu_percent             of one CPU: a served engine that nobody asks, its core in a process of its own

Each engine is a process of its own with the same settings; one is asked at a time (engine_host.py).  How fast a process
is depends on where its memory happens to lie (up to 20 % between equal engines), so all of them are started several
times.  The ratio is that of the medians, ``low`` and ``high`` are the 10th and 90th percentile of the ratios of single
rounds, ``starts`` are the ratios of the medians of each set of engines.
A time counts only if vLLM's counters say that exactly the right tokens came from the external cache, and the answers
are those of the engine without one; else the case is reported as failed (engine_rounds.py).

Needs vLLM 0.32 (CPU).  LMCache 0.5.6 takes part if the interpreter ``--peer-python`` has it beside vLLM: its own
connector, unchanged, and its server with engine_driven transfers through shared memory.  ``others_percent``: of the
CPUs, used by other processes during the rounds that count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvkeep.bench.common import BenchError, Daemon, Report, arguments, require_memory, run
from kvkeep.bench.engine_model import VOCABULARY
from kvkeep.bench.engine_process import (
    KVKEEP,
    LMCACHE,
    NONE,
    Engine,
    LMCacheServer,
    has_module,
    version_of,
    write_model,
)
from kvkeep.bench.engine_rounds import Figures, Load, rounds, turns

LOADS = (Load(512, 8, 24), Load(2048, 4, 16), Load(8192, 2, 8), Load(32768, 1, 3, warm_up=0))
STARTS = 3  # of each engine
QUICK = (Load(512, 2, 1),)
WARM_UP = Load(512, 1, 1)  # of a fresh engine; its first step must not be one of a single token
MISS_BAR, MISS_LMCACHE_BAR = "ratio <= 1.03", "ratio <= 1"
HIT_BAR, HIT_LMCACHE_BAR = "ratio <= 1", "ratio <= 0.6"
SCHEDULER_BAR = "value <= 1"
MESSAGES_BAR = "value <= 0"
IDLE_BAR = "value <= 0.1"  # more than without: what two equal engines differ by
DECODE_PROMPT, DECODE_STEPS = 600, 100  # no chunk of 256 tokens is completed meanwhile
IDLE_WINDOWS, IDLE_S, QUICK_IDLE_S, REST_S = 6, 10.0, 1.0, 5.0
L1_BYTES = 512 << 20  # of each cache: four times what a round stores
ENGINE_BYTES = 5 << 28  # private memory of one engine
NAMES = {"miss": "miss", "hit": "hit", "together": "hit_together"}
WITHOUT = "vLLM without a connector"


class Setup(NamedTuple):
    """Where the engines run, and what they are attached to."""

    folder: Path
    model: Path
    python: dict[str, str]  # by engine
    where: dict[str, str]  # run directory or port, by engine
    peer: str  # "lmcache 0.5.6", or empty
    clear: Callable[[], None]  # empties the caches
    patient: bool  # nothing is measured


def main(argv: Sequence[str] | None = None) -> int:
    peer = ("--peer-python", {"metavar": "PATH", "default": sys.executable, "help": "interpreter that has lmcache"})
    calm = {"type": float, "default": 100.0, "metavar": "PERCENT", "help": "leave out rounds in which others use more"}
    args = arguments("engine", __doc__ or "", argv, peer, ("--calm", calm))
    report = Report(args, "engine on the CPU; seconds a round, p50 (low, high: ratios of single rounds)")
    return run("engine", lambda args: measure(report, args), args) or int(report.failures > 0)


def measure(report: Report, args: argparse.Namespace) -> None:
    if not has_module(sys.executable, "vllm"):
        report.missing("engine", "s", "vllm is not installed here")
        return
    loads = [load for load in (QUICK if args.quick else LOADS) if report.wanted(args, *names_of(load))]
    decode = report.wanted(args, "decode_messages")
    idle = report.wanted(args, "idle_cpu_percent") and not (args.quick and not args.only)  # engines of their own
    figures = {load: Figures(load) for load in loads}
    starts = 1 if args.quick or not loads else STARTS
    with setup(args, report) as found:
        for start in range(starts if loads or decode else 0):
            with engines_of(found, first=start) as engines:
                for load in loads:
                    count = -(-load.rounds // starts)
                    report.note(
                        f"engines {start + 1} of {starts}: {count} x {load.prompts} prompts of {load.length} tokens"
                    )
                    rounds(engines, figures[load], count, args.seed, found.clear, args.calm, start)
                if decode and start == starts - 1:
                    decode_case(report, args, engines, found.peer)
        for load in loads:
            show(report, args, figures[load], found.peer)
        if idle:
            with engines_of(found, own_process=True) as engines:
                idle_case(report, args, engines)


def names_of(load: Load) -> list[str]:
    names = [f"{NAMES[phase]}/{load.length}" for phase in load.phases()]
    names += [f"{name}/lmcache" for name in names]
    return names + [f"scheduler/{phase}/{load.length}" for phase in ("miss", "hit")]


# ---- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def setup(args: argparse.Namespace, report: Report) -> Iterator[Setup]:
    peer = ""
    if has_module(args.peer_python, "lmcache"):
        peer = f"lmcache {version_of(args.peer_python, 'lmcache')}"
    else:
        report.missing("lmcache", "s", f"lmcache is not installed for {args.peer_python}: see --peer-python")
    many = 3 if peer else 2
    if problem := require_memory((many - 1) * L1_BYTES + many * ENGINE_BYTES):
        raise BenchError(problem)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvkeep-bench-")))
        daemon = stack.enter_context(Daemon(L1_BYTES))
        daemon.start()
        where = {NONE: "", KVKEEP: str(daemon.run_dir)}
        if peer:
            server = stack.enter_context(LMCacheServer(args.peer_python, folder, L1_BYTES))
            where[LMCACHE] = str(server.port)
        model = write_model(folder / "model")
        client = stack.enter_context(daemon.attach("bench-watch", arena=False))
        daemon.wait_reserved(client)
        if peer and not server.ready().uses_shared_memory():
            raise BenchError("lmcache server has no segment in /dev/shm: its transfers would go through its socket")
        python = dict.fromkeys(where, sys.executable) | ({LMCACHE: args.peer_python} if peer else {})

        def clear() -> None:
            client.clear()
            if peer:
                server.clear()

        yield Setup(folder, model, python, where, peer, clear, args.quick)


@contextmanager
def engines_of(found: Setup, *, own_process: bool = False, first: int = 0) -> Iterator[dict[str, Engine]]:
    """All of them, ready and warm.  ``first``: which of them is started first."""
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for who in turns(list(found.where), first):
            where = found.where[who]
            where_it_runs = (found.python[who], found.folder, found.model)
            engine = Engine(who, *where_it_runs, where, own_process=own_process, patient=found.patient)
            engines[who] = stack.enter_context(engine)
        for engine in engines.values():
            engine.ready()
        if own_process:
            for number, engine in enumerate(engines.values()):
                engine.tell("generate", prompt=[3 + number] * DECODE_PROMPT)
        else:
            rounds(engines, Figures(WARM_UP), WARM_UP.rounds, 0, found.clear)
        yield engines


# ---- cases -----------------------------------------------------------------------------------------------------------


def show(report: Report, args: argparse.Namespace, figures: Figures, peer: str) -> None:
    bars = {"miss": (MISS_BAR, MISS_LMCACHE_BAR)}
    for phase in figures.load.phases():
        name = f"{NAMES[phase]}/{figures.load.length}"
        bar, peer_bar = bars.get(phase, (HIT_BAR, HIT_LMCACHE_BAR))
        if report.wanted(args, name):
            time_case(report, figures, name, phase, (NONE, WITHOUT), bar)
        if peer and report.wanted(args, f"{name}/lmcache"):
            time_case(report, figures, f"{name}/lmcache", phase, (LMCACHE, peer), peer_bar)
    for phase in ("miss", "hit"):
        if report.wanted(args, name := f"scheduler/{phase}/{figures.load.length}"):
            scheduler_case(report, figures, name, phase, peer)


def time_case(report: Report, figures: Figures, name: str, phase: str, beside: tuple[str, str], bar: str) -> None:
    reference, reference_name = beside
    if problem := figures.problem(phase, KVKEEP, reference):
        report.failed(name, "s_p50", problem)
        return
    ours, theirs = figures.values(phase, KVKEEP), figures.values(phase, reference)
    low, high = np.percentile(ours / theirs, (10, 90))
    fields: dict[str, Any] = {}
    if phase == "miss":
        stored = [np.median(figures.values(phase, who, "stored_s")) for who in (KVKEEP, reference)]
        fields["until_stored_ratio"] = stored[0] / stored[1]
    report.case(
        name,
        float(np.median(ours)),
        "s_p50",
        reference=float(np.median(theirs)),
        reference_name=reference_name,
        bar=bar,
        low=float(low),
        high=float(high),
        **fields,
        starts=[round(ratio, 3) for ratio in figures.ratios_of_starts(phase, KVKEEP, reference)],
        prompts=figures.load.prompts,
        rounds=figures.load.rounds,
        others_percent=float(np.median(figures.others)),
    )


def scheduler_case(report: Report, figures: Figures, name: str, phase: str, peer: str) -> None:
    engines = (KVKEEP, LMCACHE) if peer else (KVKEEP,)
    if problem := figures.problem(phase, *engines):
        report.failed(name, "ms", problem)
        return
    fields: dict[str, Any] = {"cpu_ms": float(np.median(figures.connector_ms(phase, KVKEEP, "cpu_s")))}
    if peer:
        fields["lmcache_cpu_ms"] = float(np.median(figures.connector_ms(phase, LMCACHE, "cpu_s")))
    ours = figures.connector_ms(phase, KVKEEP)
    report.case(
        name,
        float(np.median(ours)),
        "ms",
        reference=float(np.median(figures.connector_ms(phase, LMCACHE))) if peer else None,
        reference_name=peer,
        bar=SCHEDULER_BAR,
        highest=float(ours.max()),
        longest_call_ms=float(figures.connector_ms(phase, KVKEEP, "longest_s").max() * figures.load.prompts),
        **fields,
        rounds=figures.load.rounds,
    )


def decode_case(report: Report, args: argparse.Namespace, engines: dict[str, Engine], peer: str) -> None:
    rng = np.random.default_rng(args.seed)
    prompt = rng.integers(3, VOCABULARY, DECODE_PROMPT).tolist()
    found = {who: engine.tell("decode", prompt=prompt, steps=DECODE_STEPS) for who, engine in engines.items()}
    if not found[KVKEEP]["prefill"]:
        report.failed("decode_messages", "msg/step", "not even the prefill was seen to send a message")
        return
    steps = {who: (counted["messages"] - counted["pings"]) / DECODE_STEPS for who, counted in found.items()}
    report.case(
        "decode_messages",
        steps[KVKEEP],
        "msg/step",
        reference=steps.get(LMCACHE),
        reference_name=peer,
        bar=MESSAGES_BAR,
        pings=found[KVKEEP]["pings"],
        prefill_messages=found[KVKEEP]["prefill"],
        steps=DECODE_STEPS,
    )


def idle_case(report: Report, args: argparse.Namespace, engines: dict[str, Engine]) -> None:
    """All of them in the same windows."""
    report.note("idle engines")
    window = QUICK_IDLE_S if args.quick else IDLE_S
    time.sleep(window if args.quick else REST_S)
    found: dict[str, list[float]] = {who: [] for who in engines}
    for _ in range(1 if args.quick else IDLE_WINDOWS):
        began, before = time.monotonic(), {who: engine.cpu_s() for who, engine in engines.items()}
        time.sleep(window)
        after, took = {who: engine.cpu_s() for who, engine in engines.items()}, time.monotonic() - began
        for who in engines:
            found[who].append(100 * (after[who] - before[who]) / took)
    percent = {who: float(np.median(values)) for who, values in found.items()}
    more = np.array(found[KVKEEP]) - np.array(found[NONE])
    report.case(
        "idle_cpu_percent",
        percent[KVKEEP] - percent[NONE],
        "% more",
        bar=IDLE_BAR,
        kvkeep=percent[KVKEEP],
        without=percent[NONE],
        lmcache=percent.get(LMCACHE),
        low=float(more.min()),
        high=float(more.max()),
        window_s=window,
    )
