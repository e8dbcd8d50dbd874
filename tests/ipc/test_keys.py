"""Identity: any one thing that the bytes depend on, changed, gives another name; equal things give equal names."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from kvkeep.ipc.keys import ChunkHasher, Group, Key, Manifest, Media, canonical, digest

GROUP = Group(layers=("l0", "l1"), kind="full", shape=(2, 16, 8, 64), order="kv,token,head,dim", page_bytes=32768)
MANIFEST = Manifest(model="org/model", kv_dtype="bfloat16", block_size=16, chunk_tokens=256, groups=(GROUP,))
TOKENS = list(range(1000, 1000 + 64))
SPACE = digest(canonical(MANIFEST), shard_bytes=4096)


def hasher(**fields: Any) -> ChunkHasher:
    return ChunkHasher(fields.pop("namespace", SPACE), **{"chunk_tokens": 16, **fields})


def test_golden_manifest() -> None:
    assert canonical(MANIFEST) == (
        b'{"block_size":16,"chunk_tokens":256,"connector_abi":"","context_parallel":1,"engine":"","extras":{},'
        b'"fingerprint":null,"format":1,"groups":[{"kind":"full","layers":["l0","l1"],"order":"kv,token,head,dim",'
        b'"page_bytes":32768,"shape":[2,16,8,64],"strides":[]}],"hash_algorithm":"kvkeep.v1","hash_seed":null,'
        b'"kv_dtype":"bfloat16","model":"org/model","pipeline_parallel":1,"revision":null,"scales":null,'
        b'"tensor_parallel":1}'
    )
    assert SPACE.hex() == "8a8d00bcec0a9087aed58362deeb1755d04ec913e57f965e3426cbbdeeba024e"


def test_golden_hashes() -> None:
    full = hasher(adapter="lora", salt=b"\x01", tags={"b": "2", "a": ""})
    image = [Media(b"\xaa" * 32, 10, 30)]
    last = [hasher().chunk_hashes(TOKENS)[-32:].hex(), full.chunk_hashes(TOKENS, media=image)[-32:].hex()]
    assert [hasher().root.hex(), full.root.hex()] == [
        "62798210052543ca377d3397a2eaaab0e1a6162628b246eb294e8b816c40f2ca",
        "a3783ab97347e2d9c095b6aa39c4bac08f0579b8fc6b7e22cb71f7b7e337ae8a",
    ]
    assert last == [
        "cdd26087c2b1c806324cf967ebe90ceffd124b872bd94d751c2b70aeda42e039",
        "758286f2a546d1a93be6cff5d5f93e129176b58621f4eb061d37e4a661479407",
    ]


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = (
        "from kvkeep.ipc.keys import *; "
        "print(ChunkHasher(bytes(32), salt='s', tags={'x': 'y'}).chunk_hashes(range(512)).hex())"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert out == {ChunkHasher(bytes(32), salt="s", tags={"x": "y"}).chunk_hashes(range(512)).hex()}


OTHER: dict[str, Any] = {
    "model": "org/other",
    "kv_dtype": "fp8",
    "block_size": 32,
    "chunk_tokens": 128,
    "revision": "main",
    "fingerprint": "f",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "groups": (),
    "scales": "s",
    "connector_abi": "2",
    "engine": "vllm",
    "hash_algorithm": "sha256",
    "hash_seed": "0",
    "extras": {"a": 1},
    "format": 2,
}


def test_every_field_of_the_manifest_and_of_a_group_matters() -> None:
    def named(**changes: Any) -> bytes:
        return digest(canonical(msgspec.structs.replace(MANIFEST, **changes)), shard_bytes=4096)

    assert set(OTHER) == set(Manifest.__struct_fields__)
    seen = {SPACE} | {named(**{name: value}) for name, value in OTHER.items()}
    group: dict[str, Any] = {
        "layers": ("l0",),
        "kind": "mla",
        "shape": (2, 16, 4, 128),
        "order": "token,kv,head,dim",
        "strides": (1, 2, 3, 4),
        "page_bytes": 1,
    }
    assert set(group) == set(Group.__struct_fields__)
    seen |= {named(groups=(msgspec.structs.replace(GROUP, **{name: value}),)) for name, value in group.items()}
    assert len(seen) == 1 + len(OTHER) + len(group)


def test_absent_is_not_empty_in_a_manifest() -> None:
    assert canonical({"revision": None}) != canonical({"revision": ""}) != canonical({})


def test_the_order_of_keys_and_the_kind_of_sequence_do_not_matter() -> None:
    assert canonical({"a": (1, 2), "b": {"c": 1, "d": 2}}) == canonical({"b": {"d": 2, "c": 1}, "a": [1, 2]})
    assert canonical({"name": "Zoë"}) == b'{"name":"Zo\\u00eb"}'


@pytest.mark.parametrize(
    "bad",
    [
        {"x": float("nan")},
        {"x": float("inf")},
        {"x": b"bytes"},
        {"x": {1: 2}},
        {"x": {1, 2}},
        {"x": 2**70},
        {"x": "\ud800"},
        {"x": object()},
        {"x": "y" * 20000},
        ["not a mapping"],
    ],
)
def test_what_has_no_canonical_form_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"manifest|limit|mapping"):
        canonical(bad)


def test_deep_nesting_is_refused() -> None:
    tree: Any = 1
    for _ in range(10000):
        tree = [tree]
    with pytest.raises(ValueError, match="deeper"):
        canonical({"x": tree})


def test_geometry_is_part_of_the_identity() -> None:
    text = canonical(MANIFEST)
    assert len({digest(text, shard_bytes=b, shards=n) for b in (4096, 8192) for n in (1, 2)}) == 4


def test_every_ingredient_of_the_root_matters_and_absent_is_not_empty() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"namespace": bytes(32)},
        {"chunk_tokens": 32},
        {"adapter": ""},
        {"adapter": "a"},
        {"salt": ""},
        {"salt": "a"},
        {"tags": {}},
        {"tags": {"a": ""}},
        {"tags": {"": "a"}},
        {"tags": {"a": "b"}},
        {"tags": {"a": "b", "c": "d"}},
        {"adapter": "a", "salt": "b"},
        {"adapter": "ab", "salt": ""},
        {"adapter": "", "salt": "ab"},
    ]
    roots = {hasher(**fields).root for fields in variants}
    assert len(roots) == len(variants)
    assert hasher(tags={"a": "1", "b": "2"}).root == hasher(tags={"b": "2", "a": "1"}).root


def test_one_token_changes_its_chunk_and_all_after_it_and_none_before() -> None:
    base = hasher().chunk_hashes(TOKENS)
    for position in range(len(TOKENS)):
        changed = list(TOKENS)
        changed[position] += 1
        other = hasher().chunk_hashes(changed)
        chunk = position // 16
        assert other[: chunk * 32] == base[: chunk * 32]
        assert all(other[i * 32 : i * 32 + 32] != base[i * 32 : i * 32 + 32] for i in range(chunk, 4))


def test_media_change_the_chunks_they_touch_and_all_after() -> None:
    base = hasher().chunk_hashes(TOKENS)
    image = Media(b"A" * 32, 20, 20)  # chunks 1 and 2
    with_image = hasher().chunk_hashes(TOKENS, media=[image])
    assert with_image[:32] == base[:32]
    assert with_image[32:64] != base[32:64]
    others = [image._replace(hash=b"B" * 32), image._replace(hash=b"A" * 31), image._replace(start=21)]
    for other in others:
        assert hasher().chunk_hashes(TOKENS, media=[other])[32:64] != with_image[32:64]
    two = [Media(b"A" * 32, 0, 4), Media(b"B" * 32, 8, 4)]
    swapped = [Media(b"B" * 32, 0, 4), Media(b"A" * 32, 8, 4)]
    assert hasher().chunk_hashes(TOKENS, media=two) == hasher().chunk_hashes(TOKENS, media=two[::-1])
    assert hasher().chunk_hashes(TOKENS, media=two) != hasher().chunk_hashes(TOKENS, media=swapped)


def test_an_item_that_reaches_into_later_chunks_counts_in_each() -> None:
    a = hasher().chunk_hashes(TOKENS, media=[Media(b"A" * 32, 0, 20)])
    b = hasher().chunk_hashes(TOKENS, media=[Media(b"A" * 32, 0, 10)])
    assert a[:32] == b[:32]
    assert a[32:64] != b[32:64]


def test_a_chain_can_be_continued() -> None:
    media = [Media(b"A" * 32, 28, 10)]
    whole = hasher().chunk_hashes(TOKENS, media=media)
    head = hasher().chunk_hashes(TOKENS[:32], media=media)
    rest = [item._replace(start=item.start - 32) for item in media]
    assert head + hasher().chunk_hashes(TOKENS[32:], media=rest, parent=head[-32:]) == whole


def test_all_forms_of_tokens_agree_and_partial_chunks_have_no_hash() -> None:
    forms: list[Any] = [TOKENS, tuple(TOKENS), range(1000, 1064)]
    forms += [np.array(TOKENS, dtype) for dtype in ("u2", "i4", "i8", "u4", ">i8")]
    assert len({hasher().chunk_hashes(form) for form in forms}) == 1
    assert hasher().chunk_hashes(TOKENS[:15]) == b""
    assert hasher().chunk_hashes([]) == b""
    assert len(hasher().chunk_hashes(TOKENS[:33])) == 64


@pytest.mark.parametrize("bad", [[-1] * 16, [2**32] * 16, [1.5] * 16, ["a"] * 16, [[1, 2]] * 16])
def test_token_ids_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        hasher().chunk_hashes(bad)


@pytest.mark.parametrize("media", [Media(b"A", 0, 0), Media(b"", 0, 1)])
def test_media_items_without_extent_or_hash_are_refused(media: Media) -> None:
    with pytest.raises(ValueError, match="media item"):
        hasher().chunk_hashes(TOKENS, media=[media])


KEYS = [
    Key("org/model", 8, 3, b"\x01" * 32, "bfloat16"),
    Key("m", 1, 0, b"\xff", "fp8", layer=0),
    Key("m", 1, 0, b"\xff", "fp8", tags=(("user", "a"), ("x", ""))),
    Key("m", 1, 0, b"\xff", "fp8", layer=17, tags=(("1", "2"),)),
]


@pytest.mark.parametrize("key", KEYS)
def test_a_readable_key_survives_the_round_trip(key: Key) -> None:
    assert Key.from_string(key.to_string()) == key


def test_the_readable_form_is_what_people_know() -> None:
    assert KEYS[3].to_string() == "m@1@0@ff@fp8@17@1%2"
    assert len({key.to_string() for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("char", ["@", "%", " ", "\n", "\x00"])
def test_restricted_characters_are_refused_with_one_sentence(char: str) -> None:
    for key in (
        KEYS[0]._replace(model=f"a{char}b"),
        KEYS[0]._replace(dtype=f"a{char}b"),
        KEYS[0]._replace(tags=((f"a{char}b", ""),)),
        KEYS[0]._replace(tags=(("a", f"a{char}b"),)),
    ):
        with pytest.raises(ValueError, match="separate the parts"):
            key.to_string()


@pytest.mark.parametrize(
    "text",
    ["", "m@1@0@ff", "m@x@0@ff@d", "m@01@0@ff@d", "m@1@0@FF@d", "m@1@0@f@d", "m@1@0@@d", "@1@0@ff@d", "m@1@0@ff@",
     "m@1@0@ff@d@x", "m@1@0@ff@d@t%v@3", "m@1@0@ff@d@%v", "m@1@0@ff@d@t%v%w", "m@-1@0@ff@d"],
)  # fmt: skip
def test_a_string_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"key|tag t"):
        Key.from_string(text)


def test_no_two_chunk_sizes_share_a_hash() -> None:
    sizes = [hasher(chunk_tokens=n).chunk_hashes(TOKENS)[:32] for n in (1, 2, 16, 32, 64)]
    assert all(a != b for a, b in itertools.combinations(sizes, 2))
