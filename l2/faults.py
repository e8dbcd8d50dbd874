"""When to fail, and how: the schedule behind `fault_inject` and behind the tests of adapters' own system calls.

A rule names an operation and a fault, and when it strikes, counted per operation from 0:

    {"operation": "store", "fault": "EIO", "at": [3, 7]}         these calls
    {"operation": "load", "fault": "bit_flip", "every": 5}       every fifth
    {"operation": "*", "fault": "stall", "seconds": 30, "rate": 0.01}      this share of them, by the seed
    {"operation": "store", "fault": "ENOSPC", "after": 10, "until": 20}    only within this range

The same seed and the same calls give the same faults.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvkeep.l2.adapter import AdapterError
from kvkeep.l2.options import Options

FAULTS = ("EIO", "ENOSPC", "EINVAL", "short", "bit_flip", "stall")


class Fault(NamedTuple):
    kind: str
    seconds: float
    luck: int  # 64 random bits: which bit to flip, where to cut


class _Rule(NamedTuple):
    operation: str
    fault: str
    seconds: float
    rate: float
    every: int
    at: frozenset[int]
    after: int
    until: int


class Schedule:
    """See the module.  Thread-safe."""

    def __init__(self, rules: Sequence[Mapping[str, object]], seed: int, operations: Sequence[str]) -> None:
        self._rules = [_rule(rule, operations) for rule in rules]
        self._random = random.Random(seed)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def next(self, operation: str) -> Fault | None:
        """The fault of this call of ``operation``, of the first rule that strikes."""
        with self._lock:
            number = self._calls[operation]
            self._calls[operation] += 1
            for rule in self._rules:
                if rule.operation not in ("*", operation) or not rule.after <= number < rule.until:
                    continue
                strikes = number in rule.at or (rule.every and number % rule.every == rule.every - 1)
                if strikes or (rule.rate and self._random.random() < rule.rate):
                    return Fault(rule.fault, rule.seconds, self._random.getrandbits(64))
        return None


def _rule(rule: Mapping[str, object], operations: Sequence[str]) -> _Rule:
    options = Options("fault", rule, ignore=())
    operation = options.choice("operation", "*", ("*", *operations))
    fault = options.choice("fault", "EIO", FAULTS)
    at = options.take("at", [])
    if not isinstance(at, list) or not all(isinstance(n, int) and n >= 0 for n in at):
        raise options.wrong("at", at, "a list of whole numbers")
    every, rate = options.count("every", 0), options.number("rate", 0.0, most=1.0)
    after, until = options.count("after", 0), options.count("until", 1 << 62)
    if not (at or every or rate):  # just the range
        every = 1
    seconds = options.number("seconds", 1.0, most=1e6)
    options.done()
    return _Rule(operation, fault, seconds, rate, every, frozenset(at), after, until)


def rules_of(options: Options) -> list[Mapping[str, object]]:
    rules = options.take("faults", [])
    if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
        raise AdapterError(f"{options.what}: 'faults' must be a list of objects")
    return rules
