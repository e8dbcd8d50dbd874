"""The workers that registered: how their KV is cut into objects, and the namespace that this makes.

A worker maps the arena's data segment by name, once, and goes on using the mapping.  A daemon that starts again adopts
the same segment, so its registrations are still right: they are kept in a file beside the sockets, together with the
segment's identity.  With another segment (``--forget``, a reboot) they are void, and the worker must come again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec

from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.errors import ProtocolError
from kvkeep.ipc.lmcache.wire import DTYPE_BYTES, BadRequest, Key, Registration

MAX_WORKERS = 1024
MAX_SALTS = 4096

log = logging.getLogger("kvkeep.lmcache")


class _Saved(msgspec.Struct):
    segment: str
    workers: list[Registration]


@dataclass(frozen=True)
class Layout:
    """Of one chunk of one rank."""

    model_name: str
    world_size: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def shard_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Workers:
    def __init__(self, client: Client, chunk_tokens: int, segment: Path, saved: Path) -> None:
        self._client, self._chunk_tokens, self._saved = client, chunk_tokens, saved
        self._layouts: dict[int, Layout] = {}  # by instance
        self._registrations: dict[int, Registration] = {}
        self._latest: dict[tuple[str, int], Layout] = {}
        self._namespaces: dict[tuple[Layout, str], Namespace] = {}
        self._doubted: set[int] = set()
        status = segment.stat()
        self.segment_name, self.segment_bytes = segment.name, status.st_size
        self._segment = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{chunk_tokens}"
        self._restore()

    def __len__(self) -> int:
        return len(self._layouts)

    def register(self, registration: Registration) -> None:
        """Raises BadRequest: the daemon refused, or it cannot be served."""
        if problem := registration.problem():
            raise BadRequest(f"kvkeep refuses worker {registration.instance_id}: {problem}")
        if len(self._layouts) >= MAX_WORKERS and registration.instance_id not in self._layouts:
            raise BadRequest(f"kvkeep refuses worker {registration.instance_id}: {MAX_WORKERS} are registered")
        layout = self._add(registration)
        try:
            self._namespace(layout, "")
        except ProtocolError as error:
            self.unregister(registration.instance_id)
            raise BadRequest(f"kvkeep refuses worker {registration.instance_id}: {error}") from None
        self._save()

    def unregister(self, instance_id: int) -> None:
        layout = self._layouts.pop(instance_id, None)
        self._registrations.pop(instance_id, None)
        if layout is not None:
            self._save()

    def alive(self, instance_id: int | None) -> bool:
        """The answer to a ping.  One that we do not know is told so once: it is then unwell, and at its next ping it
        registers again, which it does only after a good one."""
        if instance_id is None or instance_id in self._layouts:
            self._doubted.discard(instance_id or 0)
            return True
        if instance_id in self._doubted:
            self._doubted.discard(instance_id)
            return True
        if len(self._doubted) >= MAX_WORKERS:
            self._doubted.clear()
        self._doubted.add(instance_id)
        return False

    def of_worker(self, instance_id: int, key: Key) -> tuple[Layout, Namespace, int] | None:
        """Layout, namespace and shard of a worker's key; None = it is not registered, or not with this key."""
        layout = self._layouts.get(instance_id)
        if layout is None or (layout.model_name, layout.world_size) != (key.model_name, key.world_size):
            return None
        shard = key.worker_id
        if shard is None or not 0 <= shard < layout.world_size:
            return None
        namespace = self._namespace_or_none(layout, key.cache_salt)
        return (layout, namespace, shard) if namespace is not None else None

    def of_scheduler(self, key: Key) -> Namespace | None:
        """Of the workers that last registered with this model and number of ranks."""
        layout = self._latest.get((key.model_name, key.world_size))
        return self._namespace_or_none(layout, key.cache_salt) if layout is not None else None

    def namespaces(self) -> list[Namespace]:
        return list(self._namespaces.values())

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _add(self, registration: Registration) -> Layout:
        layout = Layout(
            registration.model_name,
            registration.world_size,
            tuple(registration.shape(self._chunk_tokens)),
            registration.dtype_str,
        )
        before = self._latest.get((layout.model_name, layout.world_size))
        if before is not None and before != layout:
            log.warning(
                "model %r with %d ranks is registered with another layout than before (%s %s, it was %s %s): lookups "
                "are answered for the new one",
                layout.model_name, layout.world_size, layout.dtype, layout.shape, before.dtype, before.shape,
            )  # fmt: skip
        self._layouts[registration.instance_id] = layout
        self._registrations[registration.instance_id] = registration
        self._latest[layout.model_name, layout.world_size] = layout
        return layout

    def _namespace_or_none(self, layout: Layout, salt: str) -> Namespace | None:
        try:
            return self._namespace(layout, salt)
        except ProtocolError as error:
            log.warning("no namespace for model %r: %s", layout.model_name, error)
            return None

    def _namespace(self, layout: Layout, salt: str) -> Namespace:
        found = self._namespaces.get((layout, salt))
        if found is None:
            if len(self._namespaces) >= MAX_SALTS:
                self._namespaces.clear()  # they are registered again when they are asked for
            found = self._client.register(
                {
                    "engine": "lmcache-mp",
                    "model": layout.model_name,
                    "ranks": layout.world_size,
                    "chunk_tokens": self._chunk_tokens,
                    "kv_dtype": layout.dtype,
                    "shape": list(layout.shape),
                },
                shard_bytes=layout.shard_bytes,
                shards=layout.world_size,
                tenant=salt,
            )
            self._namespaces[layout, salt] = found
        return found

    def _restore(self) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            saved = msgspec.json.decode(self._saved.read_bytes(), type=_Saved)
            if saved.segment == self._segment:
                for registration in saved.workers[:MAX_WORKERS]:
                    if not registration.problem():
                        self._add(registration)
        if self._layouts:
            log.info("%d workers of LMCache are still registered; they map the same segment", len(self._layouts))

    def _save(self) -> None:
        fresh = self._saved.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.json.encode(_Saved(self._segment, list(self._registrations.values()))))
            os.replace(fresh, self._saved)
        except OSError as error:
            log.warning("%s cannot be written (%s): workers must register again after a restart", self._saved, error)
