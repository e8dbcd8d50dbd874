"""Through a real daemon: change any one part of the identity, and nothing is found.  G1 G3 G4 G5 of the cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.keys import ChunkHasher, Group, Manifest, Media
from kvkeep.ipc.namespace import Namespace
from tests.conftest import Daemon
from tests.faults.oracle import contents, read

SIZE = 4096
CHUNK = 16
TOKENS = list(range(1000, 1000 + 8 * CHUNK))
IMAGE = Media(b"image-hash-of-32-bytes-full-width", 20, 30)
GROUP = Group(layers=("0", "1"), kind="full", shape=(2, 16, 8, 64), order="kv,token,head,dim")
FIELDS: dict[str, Any] = {
    "model": "org/model",
    "kv_dtype": "bfloat16",
    "block_size": 16,
    "chunk_tokens": CHUNK,
    "revision": "abc",
    "fingerprint": "weights-1",
    "groups": (GROUP,),
    "scales": "scales-1",
    "connector_abi": "kvkeep.vllm.1",
    "engine": "vllm 0.32",
    "hash_seed": "0",
    "extras": {"rope": {"theta": 10000.0}},
}
CHANGES: dict[str, Any] = {
    "model": "org/model2",
    "kv_dtype": "fp8",
    "block_size": 32,
    "chunk_tokens": CHUNK * 2,
    "revision": "abd",
    "fingerprint": "weights-2",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "groups": (Group(layers=("0", "1"), kind="full", shape=(2, 16, 8, 64), order="kv,head,token,dim"),),
    "scales": "scales-2",
    "connector_abi": "kvkeep.vllm.2",
    "engine": "vllm 0.33",
    "hash_algorithm": "sha256",
    "hash_seed": "1",
    "extras": {"rope": {"theta": 10001.0}},
    "format": 2,
}
ABSENT = ("revision", "fingerprint", "scales", "hash_seed")


class Engine:
    """One way to identify the same tokens."""

    def __init__(self, kv: Client, fields: dict[str, Any], *, shard_bytes: int = SIZE, shards: int = 1) -> None:
        self.kv = kv
        self.ns: Namespace = kv.register(Manifest(**fields), shard_bytes=shard_bytes, shards=shards)

    def hashes(self, tokens: list[int] = TOKENS, *, media: tuple[Media, ...] = (IMAGE,), **root: Any) -> bytes:
        hasher = ChunkHasher(self.ns.digest, chunk_tokens=CHUNK, **{"adapter": "lora", "salt": "tenant", **root})
        return hasher.chunk_hashes(tokens, media=media)

    def hits(self, packed: bytes) -> int:
        with self.kv.lookup(self.ns, packed) as found:
            assert read(self.kv, self.ns, packed, found)[1] == []
            return found.ready


@pytest.fixture
def kv(daemon: Daemon) -> Iterator[Client]:
    with Client.attach(daemon.run_dir) as kv:
        yield kv


@pytest.fixture
def stored(kv: Client) -> Engine:
    engine = Engine(kv, FIELDS)
    packed = engine.hashes()
    assert kv.store(engine.ns, packed, contents(packed, SIZE)).stored == 8
    assert engine.hits(packed) == 8
    return engine


def test_the_same_identity_from_another_process_hits(daemon: Daemon, stored: Engine) -> None:
    with Client.attach(daemon.run_dir) as other:
        twin = Engine(other, dict(reversed(FIELDS.items())))
        assert twin.ns.digest == stored.ns.digest
        assert twin.hits(twin.hashes()) == 8


def test_changing_any_one_field_of_the_manifest_hits_nothing(kv: Client, stored: Engine) -> None:
    assert set(CHANGES) == set(Manifest.__struct_fields__)
    digests = {stored.ns.digest}
    for field, value in CHANGES.items():
        changed = Engine(kv, {**FIELDS, field: value})
        assert changed.hits(changed.hashes()) == 0, field
        assert changed.hits(stored.hashes()) == 0, f"{field}, with the hashes of the other namespace"
        digests.add(changed.ns.digest)
    assert len(digests) == 1 + len(CHANGES)
    listed = {n["digest"]: n["manifest"] for n in kv.list()["namespaces"]}
    assert listed[stored.ns.digest.hex()]["engine"] == "vllm 0.32"
    assert stored.hits(stored.hashes()) == 8


def test_an_absent_field_is_not_an_empty_one(kv: Client, stored: Engine) -> None:
    for field in ABSENT:
        absent, empty = Engine(kv, {**FIELDS, field: None}), Engine(kv, {**FIELDS, field: ""})
        assert len({absent.ns.digest, empty.ns.digest, stored.ns.digest}) == 3, field
        assert absent.hits(absent.hashes()) == empty.hits(empty.hashes()) == 0
        assert absent.hits(stored.hashes()) == empty.hits(stored.hashes()) == 0


def test_another_geometry_is_another_namespace(kv: Client, stored: Engine) -> None:
    for geometry in ({"shard_bytes": SIZE * 2}, {"shards": 2}, {"shard_bytes": SIZE - 1}):
        other = Engine(kv, FIELDS, **geometry)
        assert other.ns.digest != stored.ns.digest
        assert other.hits(other.hashes()) == other.hits(stored.hashes()) == 0


@pytest.mark.parametrize("field", ["adapter", "salt"])
def test_another_adapter_or_salt_an_empty_one_and_none_are_four_key_spaces(stored: Engine, field: str) -> None:
    variants = [stored.hashes(**{field: value}) for value in ("other", "", None)]
    assert len({stored.hashes(), *variants}) == 4
    assert [stored.hits(packed) for packed in variants] == [0, 0, 0]


def test_tags_absent_empty_and_different_are_different(stored: Engine) -> None:
    variants = [stored.hashes(tags=tags) for tags in ({}, {"a": "b"}, {"a": "c"}, {"ab": ""}, {"a": "b", "c": "d"})]
    assert len({stored.hashes(), *variants}) == 6
    assert {stored.hits(packed) for packed in variants} == {0}


def test_salt_and_adapter_cannot_be_exchanged(stored: Engine) -> None:
    assert stored.hits(stored.hashes(adapter="tenant", salt="lora")) == 0


@pytest.mark.parametrize(
    ("media", "expected"),
    [
        ((), 1),  # chunk 0 has no image in it
        ((IMAGE._replace(hash=b"image-hash-of-32-bytes-full-widtH"),), 1),
        ((IMAGE._replace(start=21),), 1),
        ((IMAGE._replace(length=80),), 4),  # the same until it goes on where the first one had ended
        ((IMAGE, IMAGE._replace(start=100, length=5)), 6),
    ],
)
def test_another_image_or_place_hits_only_what_lies_before_it(
    stored: Engine, media: tuple[Media, ...], expected: int
) -> None:
    assert stored.hits(stored.hashes(media=media)) == expected


@pytest.mark.parametrize("position", range(0, 8 * CHUNK, 7))
def test_another_token_hits_only_the_chunks_before_it(stored: Engine, position: int) -> None:
    tokens = list(TOKENS)
    tokens[position] += 1
    assert stored.hits(stored.hashes(tokens)) == position // CHUNK


def test_numpy_and_lists_of_tokens_are_the_same_identity(stored: Engine) -> None:
    for kind in (np.int32, np.int64, np.uint32):
        assert stored.hits(stored.hashes(np.array(TOKENS, kind))) == 8  # type: ignore[arg-type]


def test_two_daemons_do_not_share(make_daemon: Callable[..., Daemon], stored: Engine) -> None:
    with Client.attach(make_daemon(l1_mib=8).run_dir) as other:
        twin = Engine(other, FIELDS)
        assert twin.hits(twin.hashes()) == 0
