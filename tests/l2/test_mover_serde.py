"""The mover's part in serdes: within the deadline, no work for what is there, never plain instead of secret."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.l2.mock import MockAdapter
from kvkeep.l2.mover import Mover
from kvkeep.l2.options import Options
from kvkeep.l2.serde import Context, Encoded, Serde
from kvkeep.l2.serde_codec import Codec
from tests.l2.conformance import NAMESPACE, key
from tests.l2.serdes import codec, kv, manifest, within_bound

SIZE = 64 << 10
ARENA = 4 << 20


class Slow(Serde):
    """Takes its time, and says how often it was asked."""

    id, name = 0x9000, "slow"

    def __init__(self, options: Options) -> None:
        self.seconds, self.encoded, self.fails = 0.0, 0, False

    def encode(self, data: memoryview, context: Context) -> Encoded:
        self.encoded += 1
        time.sleep(self.seconds)
        if self.fails:
            raise OSError("as asked")
        return Encoded(bytes(data)[::-1])

    def decode(self, data: memoryview, params: bytes, into: memoryview, context: Context) -> None:
        time.sleep(self.seconds)
        into[:] = bytes(data)[::-1]


class Rig:
    """A mover in this process, whose jobs are done one at a time, by this thread."""

    def __init__(self, by: Codec) -> None:
        self.fd = os.memfd_create("kvk-test-arena")
        os.ftruncate(self.fd, ARENA)
        self.data = np.frombuffer(mmap.mmap(self.fd, ARENA), dtype=np.uint8)
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.adapter = MockAdapter({"type": "mock"})
        self.adapter.open()
        self.mover = Mover("test", self.adapter, theirs, self.fd, ARENA, by)

    def _do(self, job: j.AnyJob) -> list[Code]:
        self.mover._do(j._jobs.decode(j.encode(job)))
        answer = j.decode_message(self.ours.recv(j.MAX_PACKET))
        assert isinstance(answer, j.Answer)
        assert answer.id == job.id
        return [Code(code) for code in answer.codes]

    def put(self, *numbers: int, seconds: float = 60, dtype: str = "bfloat16") -> list[Code]:
        for i, number in enumerate(numbers):
            self.data[i * SIZE : (i + 1) * SIZE] = np.frombuffer(kv(key(number), SIZE, dtype), np.uint8)
        return self._do(j.Put(1, time.monotonic() + seconds, *self._where(numbers), b""))

    def get(self, *numbers: int, seconds: float = 60) -> list[Code]:
        self.data[: len(numbers) * SIZE] = 0xA5
        return self._do(j.Get(2, time.monotonic() + seconds, *self._where(numbers)))

    def find(self, *numbers: int) -> list[Code]:
        namespace, shards, keys, *_ = self._where(numbers)
        return self._do(j.Find(3, time.monotonic() + 60, namespace, shards, keys))

    def loaded(self, place: int) -> bytes:
        return self.data[place * SIZE : (place + 1) * SIZE].tobytes()

    @staticmethod
    def _where(numbers: tuple[int, ...]) -> tuple[bytes, int, bytes, int, int, bytes]:
        offsets = np.arange(len(numbers), dtype="<u8") * SIZE
        return NAMESPACE, 1, b"".join(key(n).chunk for n in numbers), SIZE, SIZE, offsets.tobytes()

    def close(self) -> None:
        self.ours.close()
        self.mover._channel.close()
        os.close(self.fd)


@pytest.fixture
def rig() -> Iterator[Callable[[Codec], Rig]]:
    made: list[Rig] = []

    def make(by: Codec) -> Rig:
        made.append(Rig(by))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def slow() -> Slow:
    return Slow(Options("serde slow", {}))


def test_what_is_put_is_encoded_and_what_is_got_is_plain(rig: Callable[[Codec], Rig], tmp_path: Path) -> None:
    r = rig(codec(["fp8", "zstd", "aesgcm"], tmp_path))
    assert r.put(1, 2, 3) == [Code.OK] * 3
    assert r.adapter.usage().bytes_used < 3 * SIZE * 0.6
    assert r.get(3, 9, 1) == [Code.OK, Code.MISS, Code.OK]
    assert within_bound(kv(key(3), SIZE), r.loaded(0))
    assert within_bound(kv(key(1), SIZE), r.loaded(2))


def test_a_namespace_is_described_before_its_first_put(rig: Callable[[Codec], Rig], tmp_path: Path) -> None:
    """Over the wire, where it has no answer; a manifest of the largest size fits."""
    r = rig(Codec(codec(["fp8"], tmp_path).chain))
    text = manifest(extras={"long": "x" * 16_000})
    r.ours.send(j.encode(j.Describe(NAMESPACE, text)))
    r.ours.shutdown(socket.SHUT_WR)
    r.mover._listen(lambda: None)
    assert r.put(1) == [Code.OK]
    assert r.mover._codec.counters["serde_encoded"] == 1


def test_what_is_there_is_not_encoded_again(rig: Callable[[Codec], Rig], slow: Slow) -> None:
    r = rig(Codec([slow]))
    assert r.put(1, 2) == [Code.OK] * 2
    assert r.put(2, 1, 3) == [Code.OK] * 3
    assert slow.encoded == 3


def test_encoding_and_decoding_end_with_the_deadline(rig: Callable[[Codec], Rig], slow: Slow) -> None:
    r = rig(Codec([slow]))
    assert r.put(*range(8)) == [Code.OK] * 8
    slow.seconds, slow.encoded = 0.2, 0
    codes = r.put(*range(10, 18), seconds=0.3)
    assert codes[-1] == Code.EXPIRED
    assert slow.encoded < 8
    codes = r.get(*range(8), seconds=0.3)
    assert codes[-1] == Code.EXPIRED
    assert set(codes) <= {Code.OK, Code.EXPIRED}
    slow.seconds = 0.0
    assert r.get(*range(8)) == [Code.OK] * 8


def test_a_serde_that_fails_stores_nothing(rig: Callable[[Codec], Rig], slow: Slow) -> None:
    r = rig(Codec([slow]))
    slow.fails = True
    assert r.put(1) == [Code.UNAVAILABLE]
    assert r.adapter.usage().objects == 0


def test_without_a_serde_encoded_and_plain_objects_are_told_apart(rig: Callable[[Codec], Rig], tmp_path: Path) -> None:
    r = rig(codec(["zstd"], tmp_path))
    secret = codec(["aesgcm"], tmp_path)
    r.put(1)
    r.mover._codec = Codec()
    r.put(2)
    r.mover._codec = secret
    r.put(3)
    r.mover._codec = Codec()
    assert r.get(1, 2, 3, 4) == [Code.OK, Code.OK, Code.MISS, Code.MISS]
    assert [r.loaded(0), r.loaded(1)] == [kv(key(1), SIZE), kv(key(2), SIZE)]
    assert r.adapter.usage().objects == 3, "what cannot be read is kept"
    assert r.find(1, 2, 3) == [Code.OK, Code.OK, Code.MISS], "so that an adapter behind this one is asked"
    r.adapter.delete([key(3)])
    assert r.put(3) == [Code.OK]
    assert r.find(3) == [Code.OK], "it is another object now"
    r.adapter.delete([key(3)])
    r.mover._codec = secret
    assert r.put(3) == [Code.OK]
    assert r.get(1, 2, 3) == [Code.OK] * 3


def test_what_does_not_decode_is_removed(rig: Callable[[Codec], Rig], tmp_path: Path) -> None:
    """Its record is whole, so the adapter finds nothing: it was moved here from another key."""
    from kvkeep.l2.record import pack, unpack

    r = rig(codec(["aesgcm"], tmp_path))
    r.put(1)
    record: Any = r.adapter.objects[key(1)]
    header = unpack(memoryview(record))
    assert header is not None
    r.adapter.objects[key(2)] = bytearray(pack(header._replace(key=key(2)))) + record[256:]
    r.adapter._used += len(record)
    assert r.get(2) == [Code.CORRUPT]
    assert r.get(2, 1) == [Code.MISS, Code.OK]
    assert r.adapter.usage().objects == 1
