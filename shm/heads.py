"""Which RESERVED entries hang on which: a chunk becomes SEALED only after the head that it follows.

Engines store a chain in pieces, several ranks and several engines at once, so chunk k+1 is often complete while chunk k
is still being written.  It then waits here; when its head is sealed it follows at once, and when its head is given up
it is given up too.  That keeps "a sealed chunk's head was sealed" true at every instant, also for a crash.

Three private arrays over the entry table; -1 = none.  Only RESERVED entries have a parent or children here.

    parent[c]        the RESERVED head that c waits for
    first_child[p], next_sibling[c]     p's children, several only where chains branch
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class Heads:
    def __init__(self, capacity: int) -> None:
        # Offset by one (0 = none), so that untouched memory stays untouched whatever the capacity.
        self._parent = np.zeros(capacity, dtype=np.uint32)
        self._first = np.zeros(capacity, dtype=np.uint32)
        self._next = np.zeros(capacity, dtype=np.uint32)

    def hang_run(self, run: I64, parent: int) -> None:
        """New entries ``run``, each on the one before it, the first on RESERVED ``parent`` (-1: its head is sealed)."""
        ids = (run + 1).astype(np.uint32)
        self._first[run] = 0
        self._next[run] = 0
        self._parent[run[0]] = 0
        self._parent[run[1:]] = ids[:-1]
        self._first[run[:-1]] = ids[1:]
        if parent >= 0:
            self._parent[run[0]] = parent + 1
            self._next[run[0]] = self._first[parent]
            self._first[parent] = ids[0]

    def hang(self, entry: int, parent: int, budget: int) -> int:
        """A rooted RESERVED entry waits for this RESERVED head from now on.  Returns what is left of ``budget``, the
        steps that may be taken to see whether the head waits for the entry.  Clients make up their chains: an entry
        that waits for another head already, or that would wait for itself, stays as it is."""
        above = parent + 1
        while above and above != entry + 1 and budget:
            above = int(self._parent[above - 1])
            budget -= 1
        if above or self._parent[entry]:
            return budget
        self._parent[entry] = parent + 1
        self._next[entry] = self._first[parent]
        self._first[parent] = entry + 1
        return budget

    def rooted(self, entry: int) -> bool:
        """The head of this RESERVED entry is sealed, or it has none."""
        return not self._parent[entry]

    def is_plain_run(self, run: I64) -> bool:
        """``run`` is rooted, in order, and nothing else hangs on it: it can be sealed in one go."""
        ids = run + 1
        return bool(
            not self._parent[run[0]]
            and (self._first[run[:-1]] == ids[1:]).all()
            and not self._first[run[-1]]
            and not self._next[run[1:]].any()
        )

    def children(self, entry: int) -> list[int]:
        out, child = [], int(self._first[entry])
        while child:
            out.append(child - 1)
            child = int(self._next[child - 1])
        return out

    def above(self, entries: I64) -> I64:
        """The RESERVED heads that ``entries`` wait for, and those that these wait for, as far as not in ``entries``."""
        parents = self._parent[entries]
        if not parents.any():
            return entries[:0]
        seen = set(entries.tolist())
        found = []
        for parent in parents.tolist():
            while parent and parent - 1 not in seen:
                seen.add(parent - 1)
                found.append(parent - 1)
                parent = int(self._parent[parent - 1])
        return np.array(found, dtype=np.int64)

    def settle(self, entry: int) -> list[int]:
        """``entry`` is sealed: its children are rooted from now on.  Returns them."""
        out = self.children(entry)
        for child in out:
            self._parent[child] = 0
            self._next[child] = 0
        self._first[entry] = 0
        return out

    def settle_run(self, run: I64) -> None:
        """The same for a plain run, all sealed together."""
        self._parent[run] = 0
        self._first[run] = 0
        self._next[run] = 0

    def cut(self, entry: int) -> list[int]:
        """``entry`` is given up: take it and everything that hangs on it out.  Returns them, ``entry`` first."""
        above = int(self._parent[entry])
        if above:
            siblings = [c for c in self.children(above - 1) if c != entry]
            self._first[above - 1] = 0
            for child in reversed(siblings):
                self._next[child] = self._first[above - 1]
                self._first[above - 1] = child + 1
        out, stack = [], [entry]
        while stack:
            one = stack.pop()
            out.append(one)
            stack.extend(self.children(one))
            self._parent[one] = self._first[one] = self._next[one] = 0
        return out

    def check_integrity(self, reserved: I64) -> None:
        linked = np.flatnonzero(self._parent)
        if (
            not np.isin(linked, reserved).all()
            or not np.isin(self._parent[linked].astype(np.int64) - 1, reserved).all()
        ):
            raise AssertionError("heads: an entry that is not RESERVED has a head to wait for, or is one")
