"""Store and prefetch policies: which chunks L2 is given, and which of those it gave back stay in L1.

A policy is asked about a few chunks of one namespace at a time, in the control loop: it must not block, read a file or
import anything heavy, and should answer in microseconds.  One that raises, or answers with something else than it
should, is not asked again: the default policy decides from then on, and health is degraded with its name.

    kvkeep.store_policies      default  every adapter is given every chunk, and L1 keeps it
                               skip_l1  L1 is a buffer: a chunk leaves it once every adapter has it
    kvkeep.prefetch_policies   default  what was loaded leaves L1 with its last reader
                               retain   it stays, like anything else
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.shm import registry
from kvkeep.shm.namespaces import Namespace

Mask = npt.NDArray[np.bool_]

STORE_GROUP = "kvkeep.store_policies"
PREFETCH_GROUP = "kvkeep.prefetch_policies"
SLOW_S = 0.05

log = logging.getLogger("kvkeep.policies")


class Chunks(NamedTuple):
    """What a policy is asked about.  Nothing of it may be changed."""

    namespace: Namespace  # with .manifest, canonical JSON
    keys: npt.NDArray[np.uint64]  # (n, 4): a 32-byte chained hash each
    adapter: str  # the label of the adapter that is to be given them; for a prefetch policy ""


class StorePolicy:
    """The base of store policies, and the default one."""

    name = "default"
    buffers = False  # True: L1 is a mere buffer, chunks leave it once they are stored.  Read once, at the start.

    def select(self, chunks: Chunks) -> Mask | None:
        """Which of them this adapter is to be given, one bool each; None = all.  The others are not asked about again
        as long as they stay in L1."""
        return None


class SkipL1(StorePolicy):
    name = "skip_l1"
    buffers = True


class PrefetchPolicy:
    """The base of prefetch policies, and the default one."""

    name = "default"

    def keep(self, chunks: Chunks) -> Mask | None:
        """Which of these, just loaded from L2, stay in L1 after their last reader, one bool each; None = none."""
        return None


class Retain(PrefetchPolicy):
    name = "retain"

    def keep(self, chunks: Chunks) -> Mask | None:
        return np.ones(len(chunks.keys), dtype=bool)


STORE_POLICIES: dict[str, type[StorePolicy]] = {policy.name: policy for policy in (StorePolicy, SkipL1)}
PREFETCH_POLICIES: dict[str, type[PrefetchPolicy]] = {policy.name: policy for policy in (PrefetchPolicy, Retain)}


def store_policy(name: str) -> StorePolicy:
    """ValueError with the rest of a sentence."""
    policy: StorePolicy = _made(name, STORE_GROUP, STORE_POLICIES, StorePolicy)
    return policy


def prefetch_policy(name: str) -> PrefetchPolicy:
    """ValueError with the rest of a sentence."""
    policy: PrefetchPolicy = _made(name, PREFETCH_GROUP, PREFETCH_POLICIES, PrefetchPolicy)
    return policy


def _made(name: str, group: str, built_in: dict[str, Any], base: type) -> Any:
    policy = built_in.get(name) or registry.load(group, name, built_in)
    if not (isinstance(policy, type) and issubclass(policy, base)):
        raise ValueError(f"{name!r} is {policy!r}, not a class derived from {base.__module__}.{base.__name__}")
    try:
        return policy()
    except Exception as problem:
        raise ValueError(f"{name!r} cannot be made: {type(problem).__name__}: {problem}") from problem


class Asked:
    """One method of a policy, asked safely.  ``default`` is what it stands for when it says nothing, or fails."""

    def __init__(self, kind: str, policy: Any, method: str, *, default: bool, tell: Callable[[str], None]) -> None:
        self._kind, self._name = kind, str(getattr(policy, "name", "?"))
        self._method: Callable[[Chunks], Mask | None] | None = getattr(policy, method)
        self._default, self._tell = default, tell
        self._slow = False

    def __call__(self, chunks: Chunks) -> Mask:
        count = len(chunks.keys)
        if self._method is None:
            return np.full(count, self._default)
        began = time.perf_counter()
        try:
            mask = self._method(chunks)
            if mask is not None and (not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != (count,)):
                raise TypeError(f"it answered {mask!r:.60} for {count} chunks: give an array of so many bools, or None")
        except Exception as problem:
            mask = None
            self._method = None
            log.error("%s policy %s fails", self._kind, self._name, exc_info=problem)
            self._tell(
                f"{self._kind} policy {self._name}: {type(problem).__name__}: {problem}; the default policy decides "
                "until the next start"
            )
        took = time.perf_counter() - began
        if took > SLOW_S and not self._slow:
            self._slow = True
            log.warning("%s policy %s took %.0f ms; everybody waits for that", self._kind, self._name, took * 1e3)
        return np.full(count, self._default) if mask is None else mask
