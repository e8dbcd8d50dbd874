"""The lease table: which clients are attached, in a form that outlives the daemon.

Each attached client owns a slot of the table, and with it a lock: the read-only descriptor of the meta segment that the
daemon opened for this client and passed to it carries an OFD read lock on the slot's bytes.  Such a lock belongs to the
open file description, so it lives exactly as long as the client (or a child that inherited it) keeps it open, works
across pid namespaces, and a kill releases it.  A new daemon therefore sees which clients of the old one are still
alive, and waits with everything they may still be reading or writing (*ghosts*) until they attached again or are gone.

The lease of the gateway for LMCache stands for workers that map the data segment by themselves and hold no lock.  They
copy for a moment after it has ended; so it counts as alive for `EXTERNAL_S` more.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time

import numpy as np
import numpy.typing as npt

from kvkeep.shm.layout import LEASE, LEASE_OFFSET, MAX_LEASES

EXTERNAL_NAME = "lmcache-workers"
EXTERNAL_S = 10.0  # a worker's copy of a step takes milliseconds

_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
_GETLK = getattr(fcntl, "F_OFD_GETLK", 36)
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, len, pid (0 for OFD locks)


def _range(kind: int, slot: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, LEASE_OFFSET + slot * LEASE.itemsize, 1, 0)


class LeaseTable:
    def __init__(self, memory: npt.NDArray[np.uint8], meta_fd: int) -> None:
        self._rows = memory.view(LEASE)
        self._meta_fd = meta_fd
        self._free = list(range(MAX_LEASES - 1, -1, -1))
        self._slot: dict[int, int] = {}
        self.ghosts: dict[int, int] = {}  # lease id of an earlier epoch -> slot, still alive as far as we know
        self._external_until = 0.0
        self._next_id = 1

    def adopt(self) -> None:
        """Sort the slots of an earlier daemon into ghosts and free ones."""
        self._free = []
        self._external_until = time.monotonic() + EXTERNAL_S
        for slot in range(MAX_LEASES - 1, -1, -1):
            lease_id = int(self._rows[slot]["lease_id"])
            self._next_id = max(self._next_id, lease_id + 1)
            if lease_id and (self._locked(slot) or self._external(slot)):
                self.ghosts[lease_id] = slot
            else:
                self._rows[slot]["lease_id"] = 0
                self._free.append(slot)

    def add(self, *, epoch: int, pid: int, uid: int, name: str) -> tuple[int, int]:
        """A new lease: (lease id, meta descriptor to pass to the client).  The descriptor is the caller's to close.

        Raises OSError when descriptors run out, IndexError when all slots are taken.
        """
        slot = self._free.pop()
        try:
            fd = os.open(f"/proc/self/fd/{self._meta_fd}", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.fcntl(fd, _SETLK, _range(fcntl.F_RDLCK, slot))
        except OSError:
            self._free.append(slot)
            raise
        lease_id = self._next_id
        self._next_id += 1
        row = self._rows[slot]
        row["epoch"], row["pid"], row["uid"], row["name"] = epoch, max(pid, 0), uid, name.encode()[:40]
        row["lease_id"] = lease_id
        self._slot[lease_id] = slot
        return lease_id, fd

    def remove(self, lease_id: int) -> None:
        slot = self._slot.pop(lease_id)
        self._rows[slot]["lease_id"] = 0
        self._free.append(slot)

    def is_ghost_of(self, lease_id: int, *, pid: int, uid: int) -> bool:
        """Whether this process held the lease under an earlier daemon: nobody else may say that its copies ended."""
        slot = self.ghosts.get(lease_id)
        if slot is None:
            return False
        row = self._rows[slot]
        return int(row["uid"]) == uid and int(row["pid"]) == max(pid, 0)

    def settle(self, lease_id: int) -> None:
        """A ghost attached again: its last copy under the old epoch has ended."""
        slot = self.ghosts.pop(lease_id, None)
        if slot is not None:
            self._rows[slot]["lease_id"] = 0
            self._free.append(slot)

    def bury_dead_ghosts(self) -> int:
        """Forget ghosts that died.  Returns how many are still alive."""
        for lease_id, slot in list(self.ghosts.items()):
            if not self._locked(slot) and not (self._external(slot) and time.monotonic() < self._external_until):
                self.settle(lease_id)
        return len(self.ghosts)

    def _external(self, slot: int) -> bool:
        return bool(self._rows[slot]["name"] == EXTERNAL_NAME.encode())

    def _locked(self, slot: int) -> bool:
        answer = fcntl.fcntl(self._meta_fd, _GETLK, _range(fcntl.F_WRLCK, slot))
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
