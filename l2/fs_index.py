"""What the fs adapter knows about its files, in memory: names, bytes on the medium, order of eviction, who is busy.

    absent ──begin_store──► storing ──publish──► present ──take / victims──► leaving ──gone──► absent
       ▲                       │                   ▲  │                         │
       └───────end_store───────┘                   │  └── forget (vanished)     │
                                                   └────────── restore ◄────────┘  (the medium would not remove it)

Bytes are reserved before they are written and counted until they are gone from the medium, so
``used + reserved + spare <= limit`` at every moment, and the medium never holds more.  Spare is what evicted objects
leave to be written into again (fs_spares.py).  A name that is being stored or is
leaving belongs to one thread; everybody else is told BUSY.  Names with readers are not evicted.  Names of the
catalogue (catalogue.py) are in no order, so they never are.

The order belongs to a policy object of `kvkeep.shm.policies`, whose time is the number of touches.  Beside that each
name has the time of its last use in ns, never given twice, which the file keeps as its mtime: from that a restart knows
the order.  A batch is a chain from root to tail, so its last item counts as its oldest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.l2.adapter import TenantUse
from kvkeep.l2.catalogue import CATALOGUE
from kvkeep.l2.tenants import KEPT, POLICY, TenantOrder, Tenants
from kvkeep.shm.guard import Guarded
from kvkeep.shm.policies import POLICIES, Order, eviction_policy
from kvkeep.shm.recency import Clock

log = logging.getLogger("kvkeep.l2.fs")

NAME_BYTES = 20
_SPARE = 1024  # entries beyond what the limit allows; the arrays are virtual memory until they are used
_MOST_ENTRIES = 1 << 24


class Found(NamedTuple):
    """A file, as a scan saw it."""

    name: bytes
    root: int
    size: int  # on the medium
    used_ns: int  # mtime


class Victim(NamedTuple):
    name: bytes
    root: int
    size: int  # on the medium


class CapacityIndex:
    """See the module.  Thread-safe; nothing here does I/O."""

    def __init__(
        self, policy: str, limit: int, smallest: int, found: int = 0, quotas: Mapping[str, int] | None = None
    ) -> None:
        """``quotas``: bytes per tenant, with IsolatedLRU."""
        entries = max(min(limit // smallest, _MOST_ENTRIES), found) + _SPARE
        self.limit = limit
        self._recency = np.zeros(entries, dtype=np.uint64)  # the order's
        self._keys = np.zeros((entries, 4), dtype=np.uint64)  # the names, for the order's ghosts, and back from a slot
        self._times = np.zeros(entries, dtype=np.int64)
        self._sizes = np.zeros(entries, dtype=np.int64)
        self._readers = np.zeros(entries, dtype=np.int32)  # of the slot's name
        self._roots = np.zeros(entries, dtype=np.uint8)
        self._kept: set[int] = set()  # slots of the catalogue
        self.tenants = Tenants(quotas or {}) if policy == POLICY else None
        self._owners = np.zeros(entries if self.tenants else 0, dtype=np.uint16)
        self._spaces = np.zeros(entries if self.tenants else 0, dtype=np.uint32)  # number of the namespace
        self._numbers: dict[bytes, int] = {}  # of namespaces, as far as somebody has to know them
        self._expected: dict[bytes, tuple[int, int]] = {}  # of names being stored: tenant, bytes
        self._slots_used = 0
        self._free: list[int] = []
        self._slots: dict[bytes, int] = {}
        self._storing: dict[bytes, int] = {}  # with the bytes reserved
        self._leaving: dict[bytes, int] = {}  # with the slot
        self._reading: dict[bytes, int] = {}  # readers: of a name, which may leave and come again under them
        self._gone_since: set[bytes] | None = None  # during a scan
        self._order = self._ordered_by(policy)
        self._clock = Clock()
        self._used = 0
        self._reserved = 0
        self._spare = 0
        self._now = 0
        self._lock = threading.Lock()

    def _ordered_by(self, name: str) -> Order:
        if self.tenants is not None:
            return TenantOrder(self._recency, self._owners, self.tenants, lambda slots: self._sizes[slots])
        policy = eviction_policy(name)
        if name in POLICIES:
            return policy(self._recency, self._keys)
        return Guarded(
            policy,
            self._recency,
            self._keys,
            members=lambda: np.array([slot for slot in self._slots.values() if slot not in self._kept], dtype=np.int64),
            belongs=lambda slots: self._sizes[slots] > 0,
            tell=lambda reason: log.error("fs: %s", reason),
        )

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def used(self) -> int:
        """Bytes of objects."""
        return self._used

    @property
    def held(self) -> int:
        """Bytes of objects and of spares."""
        return self._used + self._spare

    @property
    def kept(self) -> int:
        """Names of the catalogue."""
        return len(self._kept)

    @property
    def leaving(self) -> int:
        return len(self._leaving)

    def names(self) -> list[bytes]:
        with self._lock:
            return list(self._slots)

    def names_in(self, folder: int, root: int) -> list[bytes]:
        with self._lock:
            return [name for name, slot in self._slots.items() if name[0] == folder and self._roots[slot] == root]

    def times(self, count: int) -> range:
        """For a batch in root-to-tail order: descending, all above every earlier one."""
        with self._lock:
            self._now = max(self._now + count, time.time_ns())
            return range(self._now, self._now - count, -1)

    def begin_read(self, name: bytes) -> bool:
        """True = whatever file has this name until `end_read` is not evicted, so it is not written over."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                return False
            self._readers[slot] = self._reading[name] = self._reading.get(name, 0) + 1
            return True

    def end_read(self, name: bytes) -> None:
        """Also when it was removed meanwhile."""
        with self._lock:
            left = self._reading.pop(name) - 1
            if left:
                self._reading[name] = left
            slot = self._slots.get(name, self._leaving.get(name, -1))
            if slot >= 0:
                self._readers[slot] = left
                self._order.released()

    def touch(self, names: Sequence[bytes], times: Sequence[int], *, read: bool) -> None:
        """A chain, root to tail, was read or stored."""
        with self._lock:
            slots = []
            for name, used_ns in zip(names, times, strict=True):
                slot = self._slots.get(name)
                if slot is not None:
                    self._times[slot] = max(used_ns, int(self._times[slot]))
                    if slot not in self._kept:
                        slots.append(slot)
            if slots:
                self._order.touch(np.array(slots, dtype=np.int64), self._clock.stamps(len(slots)), read=read)
                self._order.squeeze(len(self._slots))

    # ---- storing -----------------------------------------------------------------------------------------------------

    def begin_store(self, name: bytes) -> bool:
        """False = the name belongs to somebody just now."""
        with self._lock:
            if name in self._storing or name in self._leaving:
                return False
            self._storing[name] = 0
            return True

    def expect(self, name: bytes, size: int, namespace: bytes) -> None:
        """So many bytes are being stored: they count for their tenant already, so `excess` may be true now."""
        if self.tenants is None or namespace == CATALOGUE:
            return
        with self._lock:
            self._expect(name, self.tenants.of(namespace), size)

    def reserve(self, name: bytes, size: int, spare: int = 0) -> int:
        """0 = reserved for a name being stored, in the place of ``spare`` bytes; otherwise so many must go first."""
        with self._lock:
            over = self._used + self._reserved + self._spare - spare + size - self.limit
            if over > 0:
                return over
            if len(self._slots) + len(self._leaving) + len(self._storing) > len(self._recency):
                return size  # as many names as this index can hold
            self._reserved += size - self._storing[name]
            self._storing[name] = size
            self._spare -= spare
            return 0

    def publish(self, name: bytes, root: int, size: int, used_ns: int, namespace: bytes = b"") -> None:
        """The file is there.  Ends the store."""
        with self._lock:
            self._end_store(name)
            slot = self._enter(Found(name, root, size, used_ns), namespace)
            if slot >= 0 and slot not in self._kept:
                self._order.touch(np.array([slot], dtype=np.int64), self._clock.stamps(1), read=False)

    def end_store(self, name: bytes) -> None:
        """Whatever came of it; after `publish` this does nothing."""
        with self._lock:
            self._end_store(name)

    def _end_store(self, name: bytes) -> None:
        self._reserved -= self._storing.pop(name, 0)
        self._expect(name, 0, 0)

    def _expect(self, name: bytes, tenant: int, size: int) -> None:
        """What is being stored counts for its tenant from the moment that it asks for room."""
        if self.tenants is None:
            return
        before, already = self._expected.pop(name, (0, 0))
        self.tenants.coming[before] -= already
        if size:
            self.tenants.coming[tenant] += size
            self._expected[name] = tenant, size

    def begin_scan(self) -> None:
        """From here to `adopt`, remember what goes: a scan may have seen it before."""
        with self._lock:
            self._gone_since = set()

    def adopt(self, found: Iterable[Found], namespaces: Mapping[bytes, bytes] | None = None) -> None:
        """Files that are there already, in any order; none that our threads publish or remove meanwhile.

        ``namespaces`` by name: of the catalogue's files, and of all that are new if tenants are told apart."""
        spaces = namespaces or {}
        now = time.time_ns()
        with self._lock:
            busy = self._storing.keys() | self._leaving.keys() | (self._gone_since or set())
            new, used = [], []
            for file in sorted(found, key=lambda file: file.used_ns):
                slot = self._slots.get(file.name)
                if slot is None and file.name not in busy:
                    known = file._replace(used_ns=min(file.used_ns, now))
                    new.append(self._enter(known, spaces.get(file.name, b"")))
                elif slot is not None and now >= file.used_ns > self._times[slot]:  # by another process
                    self._times[slot] = file.used_ns
                    if slot not in self._kept:
                        used.append(slot)
            self._gone_since = None
            slots = np.array([slot for slot in new if slot >= 0 and slot not in self._kept], dtype=np.int64)
            if len(slots):
                stamps = self._clock.stamps(len(slots))[::-1]
                self._recency[slots] = stamps
                self._order.adopt(slots, stamps)
            if used:
                self._order.touch(np.array(used[::-1], dtype=np.int64), self._clock.stamps(len(used)), read=True)

    def _enter(self, file: Found, namespace: bytes) -> int:
        """The slot of a new name, not yet in the order; -1 = none is left."""
        slot = self._free.pop() if self._free else self._slots_used
        if slot >= len(self._recency):
            return -1  # another process stores more than our limit allows; its files are nothing to us
        self._slots_used = max(self._slots_used, slot + 1)
        self._keys[slot] = np.frombuffer(file.name.ljust(32, b"\0"), dtype=np.uint64)
        self._roots[slot], self._readers[slot] = file.root, self._reading.get(file.name, 0)
        self._sizes[slot], self._times[slot] = file.size, file.used_ns
        self._slots[file.name] = slot
        self._used += file.size
        if namespace == CATALOGUE:
            self._kept.add(slot)
        if self.tenants is not None:
            self._owners[slot] = KEPT if namespace == CATALOGUE else self.tenants.of(namespace)
            self._spaces[slot] = self._numbers.setdefault(namespace, len(self._numbers))
        return slot

    def resize(self, name: bytes, size: int) -> None:
        """What the medium says now."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None and self._sizes[slot] != size:
                more = size - int(self._sizes[slot])
                self._used += more
                self._sizes[slot] = size
                if isinstance(self._order, TenantOrder) and slot not in self._kept:
                    self._order.reweighed(slot, more)

    # ---- tenants -----------------------------------------------------------------------------------------------------

    def learn(self, namespace: bytes, manifest: bytes) -> None:
        """Whose a namespace is.  Files of it that are here already are that tenant's from now on."""
        if self.tenants is None:
            return
        with self._lock:
            if not self.tenants.learn(namespace, manifest) or namespace not in self._numbers:
                return
            slots = np.fromiter(self._slots.values(), dtype=np.int64, count=len(self._slots))
            slots = slots[self._spaces[slots] == self._numbers[namespace]]
            assert isinstance(self._order, TenantOrder)
            self._order.reown(slots, np.full(len(slots), self.tenants.of(namespace), dtype=np.uint16))
            leaving = [slot for slot in self._leaving.values() if self._spaces[slot] == self._numbers[namespace]]
            self._owners[leaving] = self.tenants.of(namespace)

    def usage_by_tenant(self) -> dict[str, TenantUse]:
        with self._lock:
            return {} if self.tenants is None else self.tenants.usage()

    def excess(self) -> bool:
        """Somebody has more than his quota, of objects that are not just being stored."""
        return self.tenants is not None and self.tenants.most_above().tenant >= 0

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def take(self, name: bytes) -> bool:
        """The caller will remove the file of a present name: then `gone`, or `restore`."""
        with self._lock:
            slot = self._slots.pop(name, None)
            if slot is None:
                return False
            self._leave(slot)
            self._leaving[name] = slot
            return True

    def _leave(self, slot: int) -> None:
        if slot in self._kept:
            return
        self._order.leave(np.array([slot], dtype=np.int64))
        self._recency[slot] = 0

    def excess_victims(self, most: int) -> list[Victim]:
        """Up to ``most`` names of tenants that are above their quotas, taken as by `take`."""
        with self._lock:
            if not isinstance(self._order, TenantOrder):
                return []
            slots = self._order.pop_excess(most, lambda slots: self._evictable(slots, None))
            self._order.released()
            return [self._victim(slot) for slot in slots.tolist()]

    def _victim(self, slot: int) -> Victim:
        """For a slot that the order gave up."""
        name = self._keys[slot].tobytes()[:NAME_BYTES]
        del self._slots[name]
        self._leaving[name] = slot
        return Victim(name, int(self._roots[slot]), int(self._sizes[slot]))

    def victims(self, size: int, root: int | None = None) -> list[Victim]:
        """The least recent names that make up ``size`` bytes, taken as by `take`; fewer if others are being read."""
        taken: list[Victim] = []
        with self._lock:
            while size > 0 and self._slots:
                mean = max(1, self._used // (len(self._slots) + len(self._leaving)))
                slots = self._order.pop(max(1, min(64, size // mean)), lambda slots: self._evictable(slots, root))
                if not len(slots):
                    break
                for slot in slots.tolist():
                    size -= int(self._sizes[slot])
                    taken.append(self._victim(slot))
            self._order.released()  # those passed over are looked at again next time
        return taken

    def _evictable(self, slots: npt.NDArray[np.int64], root: int | None) -> npt.NDArray[np.bool_]:
        free: npt.NDArray[np.bool_] = self._readers[slots] == 0
        return free if root is None else free & (self._roots[slots] == root)

    def gone(self, name: bytes) -> None:
        with self._lock:
            self._drop(name, self._leaving.pop(name))

    def set_aside(self, name: bytes, size: int) -> None:
        """The object is gone, its file of ``size`` bytes is a spare."""
        with self._lock:
            self._drop(name, self._leaving.pop(name))
            self._spare += size

    def spare_gone(self, size: int) -> None:
        with self._lock:
            self._spare -= size

    def restore(self, name: bytes) -> None:
        """It could not be removed; it is the most recent now, so that others are tried before it again."""
        with self._lock:
            slot = self._slots[name] = self._leaving.pop(name)
            if slot not in self._kept:
                self._order.touch(np.array([slot], dtype=np.int64), self._clock.stamps(1), read=False)

    def forget(self, name: bytes, older_than: int | None = None) -> bool:
        """The file vanished.  False = it was not known, or was used at ``older_than`` (ns) or later."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is None or (older_than is not None and self._times[slot] >= older_than):
                return False
            del self._slots[name]
            self._leave(slot)
            self._drop(name, slot)
            return True

    def _drop(self, name: bytes, slot: int) -> None:
        if self._gone_since is not None:
            self._gone_since.add(name)
        self._used -= int(self._sizes[slot])
        self._sizes[slot] = 0
        self._kept.discard(slot)
        self._free.append(slot)

    def check_integrity(self) -> None:
        with self._lock:
            slots = [*self._slots.values(), *self._leaving.values()]
            total = int(self._sizes[slots].sum()) if slots else 0
            reserved = sum(self._storing.values())
            if total != self._used or reserved != self._reserved:
                raise AssertionError(f"used {self._used} of {total}, reserved {self._reserved} of {reserved} bytes")
            if self._spare < 0:
                raise AssertionError(f"spares have {self._spare} bytes")
            if len(slots) + len(self._free) != self._slots_used:
                raise AssertionError(f"{len(slots)} names and {len(self._free)} free are not {self._slots_used} slots")
            names = [*self._slots.items(), *self._leaving.items()]
            if wrong := [name.hex() for name, slot in names if self._readers[slot] != self._reading.get(name, 0)]:
                raise AssertionError(f"slots and names have other readers: {wrong}")
            ordered = set(self._slots.values()) - self._kept
            if set(self._order.members().tolist()) != ordered:
                raise AssertionError("the order of eviction and the names differ")
            if self.tenants is not None:
                expected = [0] * len(self.tenants.used)
                for slot in ordered:
                    expected[self._owners[slot]] += int(self._sizes[slot])
                if self.tenants.used != expected:
                    raise AssertionError(f"tenants have {expected} bytes, counted {self.tenants.used}")
                if sum(self.tenants.coming) != sum(size for _, size in self._expected.values()):
                    raise AssertionError(f"tenants wait for {self.tenants.coming} bytes: {self._expected}")
