"""Rounds of `bench engine`: the same prompts to each engine in turn, and whether what came back is what it claims.

The caches are emptied before each round, so that none has to evict.  A round has three phases; in each, the engines
take turns, another one first each time:

    miss        new prompts, one after the other.  Nobody has them: what a cache costs
    hit         the same prompts again.  vLLM's own prefix cache was reset, so all comes from the external one
    together    the same, all prompts at once

An engine without a cache computes ``hit`` exactly as it computed ``miss``, so that is not measured again.

Times count only if the engine did what the phase is about: `wrong` says what it did not do.  On a machine that others
use too, ``calm`` makes a round wait until they are quiet, and leaves out the rounds in which they were not; what is
wrong counts in all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvkeep.bench.common import BenchError
from kvkeep.bench.engine_calm import Used, others_since, wait_calm
from kvkeep.bench.engine_model import VOCABULARY
from kvkeep.bench.engine_process import NONE, Engine

Round = dict[str, dict[str, dict[str, Any]]]  # phase -> engine -> its answer to "ask"

PHASES = ("miss", "hit", "together")
RETRIES = 4  # times the rounds that are wanted, before it is too noisy here
# Of float32 logprobs: the order of additions differs between a prompt that is computed and one that is loaded.
TOLERANCE = 2e-3


class Load(NamedTuple):
    """What a round asks."""

    length: int  # tokens of a prompt: whole chunks
    prompts: int
    rounds: int
    warm_up: int = 1

    def phases(self) -> tuple[str, ...]:
        return PHASES if self.prompts > 1 else PHASES[:2]


class Figures:
    """What the rounds of one load found: seconds by phase and engine, one a round, and what was wrong."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.others: list[float] = []  # one a round
        self._starts: list[int] = []  # likewise: of which engines
        self._asked: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._problems: dict[tuple[str, str], str] = {}

    def add(self, found: Round, others: float = 0.0, *, counts: bool = True, start: int = 0) -> None:
        """``others``: percent of the CPUs that they used meanwhile; ``start``: the number of the engines."""
        truth = found["miss"][NONE]["answers"]
        for phase, answers in found.items():
            for who, answer in answers.items():
                if problem := wrong(phase, who, self.load, answer, truth):
                    self._problems.setdefault((phase, who), problem)
                if counts:
                    self._asked.setdefault((phase, who), []).append(answer)
        if counts:
            self.others.append(others)
            self._starts.append(start)

    def problem(self, phase: str, *engines: str) -> str:
        found = [f"{who}: {self._problems[phase, who]}" for who in engines if (phase, who) in self._problems]
        return "; ".join(found)

    def values(self, phase: str, who: str, field: str = "seconds") -> np.ndarray[Any, np.dtype[np.float64]]:
        if who == NONE and phase == "hit":
            phase = "miss"  # the same work
        return np.array([answer[field] for answer in self._asked[phase, who]], np.float64)

    def ratios_of_starts(self, phase: str, ours: str, theirs: str) -> list[float]:
        """Of the medians, for each set of engines: what differs between them is the luck of a process."""
        starts = np.array(self._starts)
        return [
            float(
                np.median(self.values(phase, ours)[starts == one])
                / np.median(self.values(phase, theirs)[starts == one])
            )
            for one in sorted(set(self._starts))
        ]

    def connector_ms(self, phase: str, who: str, what: str = "wall_s") -> np.ndarray[Any, np.dtype[np.float64]]:
        """A request, one figure a round."""
        watched = [answer["connector"][what] for answer in self._asked[phase, who]]
        return np.array(watched, np.float64) * 1000 / self.load.prompts


def rounds(
    engines: Mapping[str, Engine],
    figures: Figures,
    count: int,
    seed: int,
    clear: Callable[[], None],
    calm: float = 100.0,
    start: int = 0,
) -> None:
    """Add ``count`` rounds.  ``clear`` empties the caches, before each.  ``calm``: percent of the CPUs that others may
    use.  ``start``: the number of these engines."""
    load, wanted = figures.load, len(figures.others) + count
    rng = random.Random(f"{seed}/{load.length}/{start}")
    for number in range(load.warm_up + RETRIES * count):
        if calm < 100 and not wait_calm(calm):
            raise BenchError(f"others used more than {calm:g} % of the CPUs for a quarter of an hour: set --calm")
        clear()
        before = Used.now()
        found = one_round(engines, load, rng, number)
        others = others_since(before)
        figures.add(found, others, counts=number >= load.warm_up and others <= calm, start=start)
        if len(figures.others) == wanted:
            return
    raise BenchError(f"{RETRIES} of {RETRIES + 1} rounds of {load.length} tokens were disturbed by others: set --calm")


def one_round(engines: Mapping[str, Engine], load: Load, rng: random.Random, number: int) -> Round:
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(load.length)] for _ in range(load.prompts)]
    found: Round = {phase: {} for phase in load.phases()}
    for phase, answers in found.items():
        for who in turns(list(engines), number):
            if (phase, who) != ("hit", NONE):
                answers[who] = engines[who].tell("ask", prompts=prompts, together=phase == "together")
    return found


def turns(names: list[str], number: int) -> Iterator[str]:
    first = number % len(names)
    yield from names[first:] + names[:first]


def wrong(phase: str, who: str, load: Load, answer: Mapping[str, Any], truth: Sequence[Any]) -> str:
    """Why the time of this answer says nothing; empty = it does.  ``truth``: what an engine without a cache answers."""
    least, most = 0, 0
    if who != NONE and phase != "miss":  # of a prompt that is all there, vLLM computes the last token
        least, most = load.prompts * (load.length - 1), load.prompts * load.length
    hits = answer["hits"]
    if not least <= hits <= most:
        return f"{hits:.0f} tokens came from the external cache instead of {most}"
    if answer["preemptions"]:
        return f"{answer['preemptions']:.0f} requests were preempted"
    for number, (got, wanted) in enumerate(zip(answer["answers"], truth, strict=True)):
        if not same(got, wanted):
            return f"prompt {number} was answered with {got} instead of {wanted}"
    return ""


def same(got: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> bool:
    """Equal best tokens and logprobs.  Where the two best are closer than the tolerance, either may win."""
    (best, logprob), (_, second) = wanted
    close = abs(got[0][1] - logprob) < TOLERANCE and abs(got[1][1] - second) < TOLERANCE
    return close and (got[0][0] == best or logprob - second < TOLERANCE)
