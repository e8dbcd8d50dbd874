"""Registers the engine's identity with the daemon, off the engine's thread.

Building a manifest reads weight files and registering is a call to the daemon, so both happen in a short-lived thread.
Until it has succeeded there is no namespace: lookups are misses and nothing is stored.  The thread ends with success or
with a refusal; from then on the client registers again by itself after each restart of the daemon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from kvkeep.ipc.vllm.metadata import NamespaceSpec

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
MAX_ERRORS = 10


class Registered(NamedTuple):
    spec: NamespaceSpec
    namespace: Any  # kvkeep.ipc.client.Namespace


class NamespaceKeeper:
    """`current` is None until registered.  `build` returns the spec, or raises Refused once and for all."""

    class Refused(Exception):
        """One sentence."""

    def __init__(self, client: Any, build: Callable[[int], NamespaceSpec], refused: Callable[[str], None]) -> None:
        self._client, self._build, self._refused = client, build, refused
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._generation = -1
        self.current: Registered | None = None

    def start(self, generation: int) -> None:
        """Register `generation`; the one before is forgotten at once."""
        with self._changed:
            self._generation, self.current = generation, None
        threading.Thread(target=self._run, args=(generation,), name="kvkeep-register", daemon=True).start()

    def wait(self, deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.current is not None, deadline_s)

    def close(self) -> None:
        self._stop.set()

    def _run(self, generation: int) -> None:
        pause, errors = FIRST_PAUSE_S, 0
        while not self._stop.is_set() and generation == self._generation:
            if self._client.attached:
                try:
                    spec = self._build(generation)
                    namespace = self._client.register(spec.manifest, shard_bytes=spec.shard_bytes, shards=spec.shards)
                except self.Refused as sentence:
                    self._refused(str(sentence))
                    return
                except Exception as error:  # the daemon went away meanwhile, or will not have it: ask again later
                    errors += 1
                    if errors >= MAX_ERRORS:
                        self._refused(f"the daemon does not register this engine's identity: {error}")
                        return
                else:
                    self._publish(generation, Registered(spec, namespace))
                    return
            self._stop.wait(pause)
            pause = min(LONGEST_PAUSE_S, pause * 1.5)

    def _publish(self, generation: int, registered: Registered) -> None:
        with self._changed:
            if generation == self._generation:
                self.current = registered
                self._changed.notify_all()
