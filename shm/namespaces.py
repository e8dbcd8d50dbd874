"""The namespace table of the meta segment: identity manifests by id.

A namespace is everything that the bytes depend on except the tokens.  Its id is its slot number + 1 and is only
meaningful within an arena; its digest covers the canonical manifest and the geometry.  A slot is reused when no entry
and no client needs it any more, so an id must never be kept across a restart without registering again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from kvkeep.shm.layout import MAX_NAMESPACES, NAMESPACE, NAMESPACE_BYTES, PAGE, align

MAX_TENANT_NAME = 128


@dataclass(frozen=True)
class Namespace:
    id: int
    digest: bytes  # 32 bytes
    manifest: bytes  # canonical JSON
    shards: int
    shard_bytes: int

    @cached_property
    def tenant(self) -> str:
        """Whose chunks these are, for quotas: see `tenant_of`."""
        return tenant_of(self.manifest)

    @property
    def stride(self) -> int:
        """From one shard to the next inside an extent: shard_bytes rounded up to a page."""
        return align(self.shard_bytes, PAGE)

    @property
    def extent_bytes(self) -> int:
        return self.stride * self.shards


def tenant_of(manifest: bytes) -> str:
    """The manifest's "tenant", "" = nobody in particular.  Never raises for what the manifest says."""
    try:
        tenant = json.loads(manifest).get("tenant")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return tenant if isinstance(tenant, str) and len(tenant) <= MAX_TENANT_NAME else ""


def namespace_digest(manifest: bytes, shards: int, shard_bytes: int) -> bytes:
    """blake3 over the geometry (two u64, little-endian) and the canonical manifest; 32 bytes."""
    geometry = shards.to_bytes(8, "little") + shard_bytes.to_bytes(8, "little")
    return blake3.blake3(b"kvkeep namespace 1\0" + geometry + manifest).digest()


class NamespaceTable:
    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._slots = [memory[i * NAMESPACE_BYTES : (i + 1) * NAMESPACE_BYTES] for i in range(MAX_NAMESPACES)]
        self._by_id: dict[int, Namespace] = {}
        self._by_digest: dict[bytes, Namespace] = {}

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, namespace_id: int) -> Namespace | None:
        return self._by_id.get(namespace_id)

    def find(self, digest: bytes) -> Namespace | None:
        return self._by_digest.get(digest)

    def free_id(self) -> int:
        """An unused id, or 0 if all are taken."""
        return next((i + 1 for i in range(MAX_NAMESPACES) if i + 1 not in self._by_id), 0)

    def add(self, namespace_id: int, manifest: bytes, shards: int, shard_bytes: int) -> Namespace:
        digest = namespace_digest(manifest, shards, shard_bytes)
        slot = self._slots[namespace_id - 1]
        head = slot[: NAMESPACE.itemsize].view(NAMESPACE)[0]
        head["id"] = 0
        head["shards"], head["shard_bytes"], head["digest"] = shards, shard_bytes, digest
        head["length"] = len(manifest)
        slot[NAMESPACE.itemsize : NAMESPACE.itemsize + len(manifest)] = np.frombuffer(manifest, dtype=np.uint8)
        head["checksum"] = self._checksum(namespace_id, digest, manifest, shards, shard_bytes)
        head["id"] = namespace_id
        return self._keep(Namespace(namespace_id, digest, manifest, shards, shard_bytes))

    def remove(self, namespace: Namespace) -> None:
        self._slots[namespace.id - 1][: NAMESPACE.itemsize].view(NAMESPACE)[0]["id"] = 0
        del self._by_id[namespace.id]
        del self._by_digest[namespace.digest]

    def adopt(self) -> int:
        """Read the table of an earlier daemon; slots that do not verify are cleared.  Returns how many were kept."""
        for number, slot in enumerate(self._slots, start=1):
            head = slot[: NAMESPACE.itemsize].view(NAMESPACE)[0]
            if not head["id"]:
                continue
            length, shards, shard_bytes = int(head["length"]), int(head["shards"]), int(head["shard_bytes"])
            good = int(head["id"]) == number and length <= NAMESPACE_BYTES - NAMESPACE.itemsize and shards > 0
            if good:
                manifest = slot[NAMESPACE.itemsize : NAMESPACE.itemsize + length].tobytes()
                digest = namespace_digest(manifest, shards, shard_bytes)
                good = int(head["checksum"]) == self._checksum(number, digest, manifest, shards, shard_bytes)
                if good and digest not in self._by_digest:
                    self._keep(Namespace(number, digest, manifest, shards, shard_bytes))
                    continue
            head["id"] = 0
        return len(self._by_id)

    def _keep(self, namespace: Namespace) -> Namespace:
        self._by_id[namespace.id] = namespace
        self._by_digest[namespace.digest] = namespace
        return namespace

    @staticmethod
    def _checksum(number: int, digest: bytes, manifest: bytes, shards: int, shard_bytes: int) -> int:
        text = b"%d %d %d " % (number, shards, shard_bytes)
        return xxhash.xxh3_64_intdigest(text + digest + manifest)
