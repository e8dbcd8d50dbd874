"""Everything of L2 that lives in control, put together: movers, store and prefetch controllers, touches, removals.

`step` runs once per round of the control loop, after everything else of the round: what was sealed is told apart
(loaded from L2, or stored by a client) and handed on, then each controller makes one bounded step.
"""

from __future__ import annotations

import json
import logging
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from kvkeep.daemon import l2_policies, ledger
from kvkeep.daemon.forget import Forget
from kvkeep.daemon.ledger import Ledger
from kvkeep.daemon.media import media_of
from kvkeep.daemon.movers import Mover
from kvkeep.daemon.prefetch_controller import PrefetchController
from kvkeep.daemon.store_controller import StoreController
from kvkeep.daemon.touches import Touches

if TYPE_CHECKING:
    from kvkeep.daemon.control import Control

STORE_SHARE = 0.25  # of L1: bytes that stores to L2 may hold, and that may queue for them
LOAD_SHARE = 0.25  # of L1: bytes that loads from L2 may be writing at a time
MOVER_STOP_S = 3.0

log = logging.getLogger("kvkeep.l2")


class L2:
    def __init__(self, control: Control, adapters: Sequence[dict[str, Any]]) -> None:
        config, arena, segments = control.config, control.arena, control.segments
        self._control = control
        self._arena = arena
        self._leases: list[int] = []
        self.movers: list[Mover] = []
        for index, adapter in enumerate(adapters):
            # The mover holds a lease, so that the next daemon knows whether it still writes (see shm/leases.py).
            lease_id, lease_fd = control.leases.add(epoch=control.epoch, pid=0, uid=0, name=f"l2-{index}")
            self._leases.append(lease_id)
            mover = Mover(
                index,
                adapter,
                data_fd=segments.data_fd,
                data_bytes=segments.geometry.data_bytes,
                lease_fd=lease_fd,
                log_level=config.log_level,
                log_format=config.log_format,
            )
            mover.watch, mover.unwatch = self._watched, control.unwatch
            mover.manifest_of = self._manifest_of
            self.movers.append(mover)
        every_bit = sum(mover.bit for mover in self.movers)
        self.touches = Touches(arena, self.movers, resume=lambda mover: self.stores.resume(mover))
        self.stores = StoreController(
            arena,
            self.movers,
            stored=self.touches.stored,
            policy=l2_policies.store_policy(config.l2_store_policy),
            cap=int(arena.bytes_total * STORE_SHARE),
            trouble=self._policy_fails("store policy"),
        )
        self.prefetch = PrefetchController(
            arena,
            self.movers,
            policy=l2_policies.prefetch_policy(config.l2_prefetch_policy),
            most=config.l2_prefetch_max_in_flight,
            budget=int(arena.bytes_total * LOAD_SHARE),
            every_bit=every_bit,
            look_again=control.engine.waiting.look_again,
            wake=control.engine.waiting.wake,
            trouble=self._policy_fails("prefetch policy"),
        )
        for mover in self.movers:
            mover.on_serving = self.stores.serving
        self.forget = Forget(
            self.movers,
            [media_of(adapter) for adapter in adapters],
            Ledger(config.run_dir),
            doom=self.prefetch.doom,
            resume=self.stores.resume,
        )
        control.engine.waiting.prefetch = self.prefetch
        self._trust_tiers(adapters)
        self._reported: dict[str, str] = {}

    def _manifest_of(self, digest: bytes) -> bytes:
        found = self._arena.namespaces.find(digest)
        return found.manifest if found is not None else b""

    def _policy_fails(self, which: str) -> Callable[[str], None]:
        def tell(reason: str) -> None:
            self._control.admin.reasons[which] = reason
            self._control.changed()

        return tell

    def _watched(self, fd: int, callback: Callable[[], object]) -> None:
        def happened() -> None:
            callback()
            self._report()

        self._control.watch(fd, happened)

    def _trust_tiers(self, adapters: Sequence[dict[str, Any]]) -> None:
        """The tier bits of an adopted arena speak of the adapters of its last daemon; of others they say nothing."""
        names = json.dumps([_identity(adapter) for adapter in adapters], sort_keys=True)
        fingerprint = xxhash.xxh3_64_intdigest(names.encode()) or 1
        superblock = self._control.segments.superblock
        if int(superblock["tiers"]) != fingerprint:
            self.stores.distrust()
            superblock["tiers"] = fingerprint

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for mover in self.movers:
            mover.start()
        self._control.timers.append(self.tick)
        self._control.steps.append(self.step)

    def step(self, now: float) -> bool:
        fresh, self._arena.fresh = self._arena.fresh, []
        if fresh:
            self.stores.take_fresh(self.prefetch.split(fresh))
        busy = self.forget.step(now)
        self.prefetch.step(now)
        busy = self.touches.step(now) or busy
        return self.stores.step(now) or busy

    def tick(self, now: float) -> float | None:
        deadlines = [mover.tick(now) for mover in self.movers]
        deadlines += [self.stores.next_deadline(now), self.prefetch.next_deadline(now), self.forget.next_deadline(now)]
        self._report()
        return min((d for d in deadlines if d is not None), default=None)

    def _report(self) -> None:
        """Health, as far as it changed."""
        reasons = self._control.admin.reasons
        said = {m.name: "; ".join([*m.reasons(), *filter(None, [self.forget.reasons(m)])]) for m in self.movers}
        said[ledger.NAME] = "; ".join(self.forget.strangers())
        for name, reason in said.items():
            if reason != self._reported.get(name, ""):
                self._reported[name] = reason
                self._control.changed()
                if reason:
                    reasons[name] = reason
                else:
                    reasons.pop(name, None)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drain(self, seconds: float, impatient: Callable[[], bool]) -> None:
        """Store what is left, for so long.  The sockets are closed: nothing comes in any more."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not impatient():
            self._arena.now = now = time.monotonic()
            busy = self.step(now)
            if self.stores.idle:
                break
            self.tick(now)
            poll = select.poll()
            for mover in self.movers:
                for fd in mover.filenos():
                    poll.register(fd, select.POLLIN)
            poll.poll(0 if busy else 20)
            for mover in self.movers:
                mover.on_child()
                mover.receive()
        if not self.stores.idle:
            log.warning("stopping with %s bytes not stored; the next start will", self.stores.queued_bytes)

    def stop(self) -> None:
        deadline = time.monotonic() + MOVER_STOP_S
        for mover in self.movers:
            mover.child.terminate()
        for mover in self.movers:
            mover.stop(deadline)
            mover.close()
        for lease_id in self._leases:
            self._control.leases.remove(lease_id)

    # ---- for checks and status ---------------------------------------------------------------------------------------

    def hold(self, references: Counter[int], writing: Counter[int]) -> None:
        self.stores.hold(references)
        self.prefetch.hold(writing)

    def rows(self) -> list[dict[str, Any]]:
        queued = self.stores.queued_bytes
        return [
            mover.row()
            | {
                "bytes_queued": queued[mover.index],
                "removals_pending": self.forget.pending(mover),
                "objects_removed": self.forget.totals[mover.index],
            }
            for mover in self.movers
        ]


def _identity(adapter: dict[str, Any]) -> dict[str, Any]:
    """Of a configuration, what its tier bits depend on: with anything else changed it is asked what it has."""
    return {key: value for key, value in adapter.items() if key not in ("threads", "eviction", "serde")}
