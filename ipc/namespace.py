"""A namespace as the client holds it: the identity stays, the id underneath changes with each attachment."""

from __future__ import annotations

from typing import NamedTuple

from kvkeep.ipc import messages as m
from kvkeep.ipc.client_rpc import Attachment
from kvkeep.ipc.keys import digest


class Binding(NamedTuple):
    """What the daemon of one epoch calls it.  id 0 = that daemon refused it."""

    attachment: Attachment
    id: int
    stride: int


class Namespace:
    """Made by `Client.register`.  Usable at once: without a daemon everything in it is a miss."""

    __slots__ = ("_binding", "digest", "manifest", "problem", "shard_bytes", "shards")

    def __init__(self, manifest: bytes, shard_bytes: int, shards: int) -> None:
        self.manifest = manifest  # canonical JSON
        self.shard_bytes = shard_bytes
        self.shards = shards
        self.digest = digest(manifest, shard_bytes=shard_bytes, shards=shards)
        self.problem = ""  # why the daemon refused it
        self._binding: Binding | None = None

    @property
    def id(self) -> int:
        """Of the current attachment; 0 = none."""
        binding = self._binding
        return binding.id if binding is not None and binding.attachment.alive else 0

    @property
    def stride(self) -> int:
        return self._binding.stride if self._binding is not None else -(-self.shard_bytes // 4096) * 4096

    def binding(self, attachment: Attachment) -> Binding | None:
        binding = self._binding
        return binding if binding is not None and binding.attachment is attachment else None

    def request(self, attachment: Attachment) -> m.Register:
        return m.Register(attachment.lease, attachment.epoch, self.manifest, self.shard_bytes, self.shards)

    def bind(self, attachment: Attachment, reply: m.AnyReply) -> str:
        """Take over the answer to `request`.  Returns the reason if the namespace cannot be used there."""
        self.problem = ""
        if isinstance(reply, m.Registered) and reply.namespace > 0:
            if reply.digest == self.digest:
                self._binding = Binding(attachment, reply.namespace, reply.stride)
                return ""
            self.problem = f"the daemon computes another digest ({reply.digest.hex()[:16]}); use one release for both"
        else:
            self.problem = reply.message if isinstance(reply, m.Error) else f"unexpected answer {type(reply).__name__}"
        self._binding = Binding(attachment, 0, 0)
        return self.problem

    def __repr__(self) -> str:
        return (
            f"Namespace({self.digest.hex()[:16]}, shard_bytes={self.shard_bytes}, shards={self.shards}, id={self.id})"
        )
