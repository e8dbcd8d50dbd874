"""Hit rates of the eviction policies on a trace of real requests, by the product's own policy objects.

A trace is a file of JSON objects, one a request, whose ``hash_ids`` name the blocks of the prompt from its root; equal
ids mean an equal prefix up to and including that block.  A prefix cache hits the leading run of blocks that it has;
then all blocks of the request are stored.  The hit rate is the share of all blocks hit.  Sizes are shares of the
distinct blocks in the trace.  `Cache` does with an order what the arena does: a read of what is found, eviction that
spares the request's own chain, a touch for the store.

For the Mooncake conversation trace (FAST 2025) the known figures of LRU, S3-FIFO and Belady are printed beside ours:
that our LRU repeats the LRU row is the check of this simulator.  ``--synthetic`` runs made-up traces instead, to see
that a policy does not fall behind LRU when the load is of another kind.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkeep.bench.common import BenchError, Report, arguments, run
from kvkeep.shm.policies import POLICIES
from kvkeep.shm.recency import Clock

Chain = tuple[int, ...]

SIZES = (1, 3, 5, 10, 30)  # percent of the distinct blocks
DEFAULT_TRACE = "mooncake_conversation_trace.jsonl"
RECOMMENDED = "Adaptive"
MARGIN = {1: 0.03, 3: 0.03}  # by which the recommended policy is to be above LRU, at these sizes; elsewhere not below
MOONCAKE_BLOCKS = (288_500, 182_790)  # references, distinct: how we know the trace whose figures these are
MOONCAKE = {
    "LRU": (0.053, 0.126, 0.196, 0.279, 0.358),
    "S3FIFO": (0.077, 0.152, 0.195, 0.245, 0.349),
    "Belady": (0.246, 0.348, 0.366, 0.366, 0.366),
}


class Cache:
    """A prefix cache of ``capacity`` blocks in the order of a policy."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.capacity = capacity
        self._recency = np.zeros(capacity, dtype=np.uint64)
        self._keys = np.zeros((capacity, 4), dtype=np.uint64)
        self._order = POLICIES[policy](self._recency, self._keys)
        self._clock = Clock()
        self._entry: dict[int, int] = {}  # block -> record
        self._block = [0] * capacity  # of a record
        self._free = list(range(capacity))
        self._own = np.zeros(capacity, dtype=bool)  # the chain that is being stored

    def request(self, chain: Chain) -> int:
        """Look the chain up, then store what is missing.  Returns how many blocks were hit."""
        entries = []
        for block in chain:
            entry = self._entry.get(block)
            if entry is None:
                break
            entries.append(entry)
        hits = len(entries)
        found = np.array(entries, dtype=np.int64)
        if hits:
            self._order.touch(found, self._clock.stamps(hits))
        missing = chain[hits:]
        if len(missing) > len(self._free):
            self._own[found] = True
            self._evict(len(missing) - len(self._free))
            self._own[found] = False
        for block in missing[: len(self._free)]:
            entry = self._free.pop()
            self._entry[block], self._block[entry] = entry, block
            self._keys[entry] = _mixed(block)
            entries.append(entry)
        if len(entries):
            self._order.touch(np.array(entries, dtype=np.int64), self._clock.stamps(len(entries)), read=False)
        while self._order.squeeze(len(self._entry)):
            pass
        return hits

    def _evict(self, want: int) -> None:
        for entry in self._order.pop(want, self._spared).tolist():
            del self._entry[self._block[entry]]
            self._free.append(entry)

    def _spared(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return ~self._own[entries]

    @property
    def blocks(self) -> set[int]:
        return set(self._entry)


def _mixed(block: int) -> int:
    """A chunk key is a hash: its bits are even (the finalizer of splitmix64)."""
    word = (block + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


def hit_rate(policy: str, capacity: int, chains: Sequence[Chain]) -> float:
    cache = Cache(policy, capacity)
    return sum(cache.request(chain) for chain in chains) / sum(map(len, chains))


def distinct(chains: Sequence[Chain]) -> int:
    return len({block for chain in chains for block in chain})


def read_trace(path: Path, limit: int | None = None) -> list[Chain]:
    chains: list[Chain] = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if len(chains) == limit:
                    break
                ids = json.loads(line)["hash_ids"]
                if not all(isinstance(i, int) for i in ids):
                    raise BenchError(f"{path}:{number}: hash_ids are not all integers")
                if ids:
                    chains.append(tuple(ids))
    except OSError as error:
        raise BenchError(f"cannot read the trace {path}: {error.strerror}; give one with --trace") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}:{number}: not a request with hash_ids ({error})") from None
    if not chains:
        raise BenchError(f"{path} holds no request")
    return chains


def default_trace() -> Path:
    """``shared/data`` of a checkout, in it or beside it."""
    here = Path(__file__).resolve()
    places = [folder / "shared" / "data" / DEFAULT_TRACE for folder in here.parents[1:4]]
    return next((place for place in places if place.exists()), places[0])


# ---- made-up loads ---------------------------------------------------------------------------------------------------


def synthetic(seed: int, scale: int = 1000) -> Iterator[tuple[str, list[Chain]]]:
    """(name, chains): about 6 * ``scale`` requests each."""
    rng = random.Random(seed)
    count = 0

    def fresh(n: int) -> Chain:
        nonlocal count
        count += n
        return tuple(range(count - n, count))

    ring = [fresh(20) for _ in range(scale // 5)]
    yield "loop", ring * 30
    hot = [fresh(20) for _ in range(100)]
    yield "scan", [rng.choice(hot) if rng.random() < 0.5 else fresh(20) for _ in range(6 * scale)]
    some = [fresh(rng.randint(4, 40)) for _ in range(2000)]
    zipf = rng.choices(some, [1 / (rank + 1) ** 0.9 for rank in range(len(some))], k=6 * scale)
    yield "zipf", zipf
    shifting: list[Chain] = []
    for _ in range(6):
        now = [fresh(20) for _ in range(150)]
        shifting += [now[min(149, int(rng.expovariate(1 / 40)))] for _ in range(scale)]
    yield "shifting", shifting
    systems = [fresh(10) for _ in range(5)]
    talks: list[Chain] = []
    chat: list[Chain] = []
    for _ in range(6 * scale):
        if talks and rng.random() < 0.7:
            at = rng.randrange(max(0, len(talks) - 150), len(talks))
            talks[at] += fresh(rng.randint(1, 6))
            chat.append(talks[at])
        else:
            talks.append(rng.choice(systems) + fresh(rng.randint(1, 12)))
            chat.append(talks[-1])
    yield "chat", chat
    yield "phases", zipf[: 3 * scale] + ring * 10 + shifting[: 2 * scale] + zipf[3 * scale :]


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(
        "simulate",
        __doc__ or "",
        argv,
        ("--trace", {"metavar": "FILE", "help": f"JSON lines with hash_ids (default: shared/data/{DEFAULT_TRACE})"}),
        ("--synthetic", {"action": "store_true", "help": "made-up traces instead of a file"}),
    )
    return run("simulate", _simulate, args)


def _simulate(args: argparse.Namespace) -> None:
    report = Report(args, "hit rates of the eviction policies: share of all blocks hit")
    if args.synthetic:
        for name, chains in synthetic(args.seed, 100 if args.quick else 1000):
            _compare(args, report, name, chains, known=False)
        return
    path = Path(args.trace) if args.trace else default_trace()
    if not args.trace and not path.exists():
        report.missing("mooncake", "share", f"there is no {path}; give a trace with --trace")
        return
    chains = read_trace(path, 500 if args.quick else None)
    known = (sum(map(len, chains)), distinct(chains)) == MOONCAKE_BLOCKS
    _compare(args, report, "mooncake" if known else path.stem, chains, known)


def _compare(args: argparse.Namespace, report: Report, name: str, chains: list[Chain], known: bool) -> None:
    """Every policy at every size, beside plain LRU of this run or what is known of it."""
    blocks = distinct(chains)
    for at, percent in enumerate(SIZES):
        capacity = max(1, round(blocks * percent / 100))
        plain = hit_rate("LRU", capacity, chains)
        for policy in (name for name, made in POLICIES.items() if made.evicts):
            case = f"{name} {percent}% {policy}"
            if not report.wanted(args, case):
                continue
            report.note(case)
            rate = plain if policy == "LRU" else hit_rate(policy, capacity, chains)
            figures = {f"known_{other}": row[at] for other, row in MOONCAKE.items()} if known else {}
            bar = ""
            if known and policy == "LRU":
                bar = f"value >= {MOONCAKE['LRU'][at] - 0.001}"
            elif known and policy == RECOMMENDED:
                bar = f"value >= {plain + MARGIN.get(percent, 0.0):.5f}"
            report.case(case, rate, "share", reference=plain, reference_name="LRU of this run", bar=bar, **figures)
