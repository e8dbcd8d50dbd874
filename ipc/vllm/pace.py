"""Whether loading a hit is faster than computing it again, learned from what both took.

    load      seconds = base + slope · tokens             a sample per load, from hand-over to end
    compute   seconds per token = base + slope · context  a sample per step of many tokens; context = tokens before them

A load that failed counts with its own time and that of the computing that followed.  Both lines are fitted by medians
(Theil–Sen) over the last samples, so that a step that compiled, a load that hung until its deadline or a throttled
second does not move them, and a lasting change does after half a window.  Until both are measured, everything is
worth it.

What is never tried is never measured again, so now and then a declined hit is let through, on credit: each declined
hit earns 1 % of the seconds that computing it takes, and a trial costs what its load takes longer than that.  One
trial at a time; what it took beyond the estimate is owed.  So all trials together cost at most 1 % of what declined
hits cost anyway (and one trial's overrun).  As many trials in a row as make a measurement, each faster than
computing, replace the old samples of loads: the daemon has become faster.

Deterministic: nothing random, and no time but the injected clock.  One thread, the engine's.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

from kvkeep.ipc.vllm.options import LEARNED

WINDOW = 32  # samples
ENOUGH = 5  # ... before anything is declined; one of them may be far out
REFIT_EVERY = 8  # samples, once the window is full
NEAR_TOKENS = 32  # samples closer than that, or than a tenth, do not make a slope
STEP_TOKENS = 128  # of one request in one step; with fewer, the step's fixed cost is what is seen
STEPS_OPEN = 8
TIMED_STEPS = 4  # one of so many
TRIAL_SHARE = 0.01
CREDIT_S = 1.0  # what can be saved up, or the cost of two trials if that is more
TRIAL_LIMIT_S = 60.0  # a trial that did not come back by then is forgotten


class Line(NamedTuple):
    base: float
    slope: float
    middle: float = 0.0  # of the tokens that were seen, if they were too much alike for a slope; else 0

    def at(self, tokens: float) -> float:
        return self.base + self.slope * tokens

    def at_most(self, tokens: float) -> float:
        """The same; without a known slope, in proportion for more tokens and nothing off for fewer."""
        return self.base * max(1.0, tokens / self.middle) if self.middle else self.at(tokens)


def fit(samples: Iterable[tuple[float, float]], *, from_zero: bool) -> Line:
    """Through (tokens, seconds); it never falls, and never goes below 0: it begins at 0 then, or is flat and low."""
    points = sorted(samples)
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] - earlier[0] > NEAR_TOKENS + earlier[0] / 10
    ]
    if len(slopes) < len(points):
        return Line(median(y for _, y in points), 0.0, median(x for x, _ in points))
    slope = max(0.0, median(slopes))
    base = median(y - slope * x for x, y in points)
    if base >= 0:
        return Line(base, slope)
    if from_zero:
        return Line(0.0, median(y / x for x, y in points if x > 0))
    return Line(sorted(y for _, y in points)[len(points) // 4], 0.0)


class Samples:
    """The last measurements of one thing, and their line: fitted when it is asked for and enough is new."""

    def __init__(self, *, from_zero: bool) -> None:
        self._from_zero = from_zero
        self._points: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._new = 0
        self._line: Line | None = None

    def add(self, tokens: float, seconds: float) -> None:
        self._points.append((tokens, seconds))
        self._new += 1

    def replace(self, points: list[tuple[float, float]]) -> None:
        self._points.clear()
        self._points.extend(points)
        self._line = None

    @property
    def full(self) -> bool:
        return len(self._points) == WINDOW

    @property
    def line(self) -> Line | None:
        """None: not measured yet."""
        if len(self._points) < ENOUGH:
            return None
        if self._line is None or self._new >= (REFIT_EVERY if len(self._points) == WINDOW else 1):
            self._line, self._new = fit(self._points, from_zero=self._from_zero), 0
        return self._line


class Pace:
    """``min_hit``: "learned", or a number of tokens from which on every hit is worth it."""

    def __init__(self, min_hit: str | int = LEARNED, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = min_hit if isinstance(min_hit, int) else None
        self._clock = clock
        self._loads, self._compute = Samples(from_zero=True), Samples(from_zero=False)
        self._steps: OrderedDict[int, tuple[float, int, float]] = OrderedDict()  # began, tokens, mean context
        self._next_step = 1
        self._large_steps = 0
        self._last_output = 0.0
        self._credit_s = 0.0
        self._trial: tuple[int, float, float] | None = None  # tokens, what was charged, forgotten at
        self._streak: list[tuple[float, float]] = []  # trials in a row that were faster than computing

    # ---- the question ------------------------------------------------------------------------------------------------

    def worth(self, tokens: int, context: int = 0) -> bool:
        """Is loading ``tokens`` after ``context`` faster than computing them?  Ask once per hit: each no counts."""
        if self._least is not None:
            return tokens >= self._least
        load, compute_s = self._loads.line, self.compute_s(tokens, context)
        if load is None or compute_s is None:
            return True
        extra = load.at_most(tokens) - compute_s
        return extra <= 0 or self._tries(tokens, extra, compute_s)

    def _tries(self, tokens: int, extra: float, compute_s: float) -> bool:
        now = self._clock()
        if self._credit_s < extra or (self._trial is not None and now < self._trial[2]):
            self._credit_s = min(self._credit_s + TRIAL_SHARE * compute_s, max(CREDIT_S, 2 * extra))
            return False
        self._credit_s -= extra
        self._trial = (tokens, extra, now + TRIAL_LIMIT_S)
        return True

    # ---- measurements ------------------------------------------------------------------------------------------------

    def times_steps(self, tokens: int) -> bool:
        """Whether to take the time of a step of so many tokens: of each until there are enough, then of a few, since
        the engine's thread pays for it."""
        if self._least is not None or tokens < STEP_TOKENS:
            return False
        self._large_steps += 1
        return not self._compute.full or self._large_steps % TIMED_STEPS == 0

    def load_ended(self, tokens: int, context: int, seconds: float, *, ok: bool) -> None:
        compute_s = self.compute_s(tokens, context)
        if not ok:
            if compute_s is None:
                return
            seconds += compute_s
        self._loads.add(tokens, seconds)
        if compute_s is None or self._trial is None or self._trial[0] != tokens:
            return
        self._credit_s += self._trial[1] - max(0.0, seconds - compute_s)
        self._trial = None
        if seconds >= compute_s:
            self._streak = []
            return
        self._streak.append((tokens, seconds))
        if len(self._streak) == ENOUGH:
            self._loads.replace(self._streak)
            self._streak = []

    def forget_loads(self) -> None:
        """Another daemon: what the one before took says nothing."""
        self._loads.replace([])
        self._trial, self._streak = None, []

    def step_began(self, pieces: Iterable[tuple[int, int]]) -> int:
        """(tokens, context) of each request in the step.  A number for `step_ended`, 0 if this step tells nothing."""
        pieces = list(pieces)
        if self._least is not None or max((tokens for tokens, _ in pieces), default=0) < STEP_TOKENS:
            return 0
        total = sum(tokens for tokens, _ in pieces)
        context = sum(tokens * (before + tokens / 2) for tokens, before in pieces) / total
        number, self._next_step = self._next_step, self._next_step + 1
        self._steps[number] = (self._clock(), total, context)
        if len(self._steps) > STEPS_OPEN:  # steps whose end was not told
            self._steps.popitem(last=False)
        return number

    def step_ended(self, number: int) -> None:
        """Its output is there.  With steps that overlap, it did not run before the output of the one before."""
        step = self._steps.pop(number, None)
        if step is not None:
            began, tokens, context = step
            self._compute.add(context, (self._clock() - max(began, self._last_output)) / tokens)

    def output_seen(self) -> None:
        """After `step_ended`, for every step."""
        self._last_output = self._clock()

    def compute_s(self, tokens: int, context: int = 0) -> float | None:
        """How long computing these tokens takes; None: not measured."""
        line = self._compute.line
        return tokens * line.at(context + tokens / 2) if line is not None else None

    def describe(self) -> dict[str, float]:
        """Seconds, for reports: of a load of 1024 tokens and of computing as many; only what is measured."""
        load, compute_s = self._loads.line, self.compute_s(1024, 0)
        found = {} if load is None else {"load_1024_s": load.at_most(1024)}
        return found if compute_s is None else found | {"compute_1024_s": compute_s}
