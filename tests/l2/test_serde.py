"""Serdes, their chains, and what becomes of objects when the configuration is another than when they were stored."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from kvkeep.l2.adapter import OK, AdapterError, Encoding, Fetched, Item, Key, Outcome
from kvkeep.l2.options import Options
from kvkeep.l2.record import SERDE_PARAM_BYTES, payload_checksum
from kvkeep.l2.serde import (
    BUILT_IN,
    FIRST_FOREIGN_ID,
    MAX_GROWTH,
    Context,
    Encoded,
    Serde,
    Undecodable,
    chain_of,
    check,
    serde_with,
    steps_of,
)
from kvkeep.l2.serde_aesgcm import read_keys
from kvkeep.l2.serde_codec import Codec, NotEncoded
from kvkeep.l2.serde_layout import UNKNOWN, Layout, layout_of
from kvkeep.l2.serde_zstd import Zstd, merge, planes
from tests.l2.conformance import key, view
from tests.l2.serdes import CHAINS, KEY_A, KEY_B, codec, config_of, key_file, kv, manifest, within_bound

SIZE = 64 << 10


def at_rest(item: Item) -> Fetched:
    """As an adapter gives it back: parameters padded as they are in the header."""
    encoding = item.encoding
    if encoding is not None:
        encoding = encoding._replace(params=encoding.params.ljust(SERDE_PARAM_BYTES, b"\0"))
    return Fetched(OK, item.payload, encoding)


def load(by: Codec, fetched: Fetched, of: Key = key(1), size: int = SIZE) -> tuple[Outcome, bytes]:
    into = view(size)
    return by.decode(of, fetched, into).outcome, bytes(into)


# ---- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, [], "zstd", ["fp8", "zstd"], {"type": "zstd", "level": 3}])
def test_a_chain_is_a_name_an_object_or_a_list_of_them(config: object) -> None:
    check({"type": "fs", "serde": config})
    names = [serde.name for serde in chain_of({"serde": config})]
    assert names == {"zstd": ["zstd"]}.get(str(config), names)
    assert len(names) == (len(config) if isinstance(config, list) else int(config is not None))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("zsdt", "no serde 'zsdt'.*did you mean 'zstd'"),
        (7, "'serde' holds 7; each entry is a name or an object with a 'type'"),
        ([["zstd"]], "each entry is a name or an object"),
        ({"level": 3}, "an object with a 'type', one of aesgcm, fp8, zstd"),
        ({"type": "zstd", "levle": 3}, "no option 'levle'.*did you mean 'level'"),
        ({"type": "zstd", "level": 99}, "'level' is 99; it must be a whole number from 0 to 22"),
        ({"type": "fp8", "level": 1}, "no option 'level'"),
        ("aesgcm", "'key_file' is missing"),
        (["zstd"] * 5, "5 entries; the limit is 4"),
    ],
)
def test_a_wrong_chain_is_one_sentence(config: object, says: str) -> None:
    for read in (check, chain_of):
        with pytest.raises(AdapterError, match=says):
            read({"serde": config})


def test_checking_a_configuration_imports_no_library_and_reads_no_key(tmp_path: Path) -> None:
    import subprocess

    config = {"serde": ["zstd", "fp8", {"type": "aesgcm", "key_file": "/nowhere"}]}
    program = f"import sys; from kvkeep.l2.serde import check; check({config!r}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "kvkeep.l2.serde_zstd" in loaded
    assert not {"zstandard", "cryptography", "torch"} & set(loaded)


@pytest.mark.parametrize(("name", "package"), [("zstd", "zstandard"), ("aesgcm", "cryptography")])
def test_a_missing_package_is_one_sentence_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, package: str
) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    made = Codec(chain_of({"serde": config_of([name], key_file(tmp_path))}))
    with pytest.raises(AdapterError, match=rf"{name} needs the package {package}.*pip install 'kvkeep\[serde\]'"):
        made.open()


# ---- third parties ---------------------------------------------------------------------------------------------------


class Backwards(Serde):
    id, name = FIRST_FOREIGN_ID, "backwards"

    def __init__(self, options: Options) -> None:
        self.fails = options.flag("fails", False)
        self.adds = options.count("adds", 0)

    def encode(self, data: memoryview, context: Context) -> Encoded:
        if self.fails:
            raise KeyError("as asked")
        return Encoded(bytes(data)[::-1] + bytes(self.adds))

    def decode(self, data: memoryview, params: bytes, into: memoryview, context: Context) -> None:
        if self.fails:
            raise KeyError("as asked")
        into[:] = bytes(data)[::-1]


class TooLow(Backwards):
    id = 7


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entry points, as a package of a third party has them."""
    found = [
        importlib.metadata.EntryPoint("backwards", f"{__name__}:Backwards", "kvkeep.l2_serdes"),
        importlib.metadata.EntryPoint("toolow", f"{__name__}:TooLow", "kvkeep.l2_serdes"),
    ]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def entry_points(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        return [e for e in found if e.group == group and name in (None, e.name)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda e: globals()[e.attr])


@pytest.mark.usefixtures("installed")
def test_a_third_party_brings_a_serde_by_an_entry_point() -> None:
    mine = Codec(chain_of({"serde": ["backwards", "zstd"]}))
    mine.open()
    item = mine.encode(Item(key(1), view(kv(key(1), SIZE))))
    assert item.encoding is not None
    assert item.encoding.serdes == (FIRST_FOREIGN_ID, 1)
    assert load(Codec(), at_rest(item)) == (Outcome.OK, kv(key(1), SIZE)), "found by its number"
    with pytest.raises(AdapterError, match="has the id 7; it must be 32768 to 65535"):
        chain_of({"serde": "toolow"})


@pytest.mark.usefixtures("installed")
def test_a_serde_that_fails_keeps_the_object_from_being_stored_and_from_being_removed(tmp_path: Path) -> None:
    good = Codec(chain_of({"serde": "backwards"}))
    bad = Codec(chain_of({"serde": [{"type": "backwards", "fails": True}]}))
    plain = view(kv(key(1), SIZE))
    with pytest.raises(NotEncoded) as caught:
        bad.encode(Item(key(1), plain))
    assert caught.value.result.outcome == Outcome.UNAVAILABLE
    item = good.encode(Item(key(1), plain))
    assert load(bad, at_rest(item))[0] == Outcome.MISS
    assert bad.counters == {"serde_failed": 2}
    with pytest.raises(NotEncoded):
        Codec(chain_of({"serde": [{"type": "backwards", "adds": MAX_GROWTH + 1}]})).encode(Item(key(1), plain))


def test_numbers_at_rest_never_change() -> None:
    assert {name: number for name, (number, *_) in BUILT_IN.items()} == {"zstd": 1, "fp8": 2, "aesgcm": 3}
    assert serde_with(9) is None


# ---- manifests -------------------------------------------------------------------------------------------------------


def _group(shape: Any, order: Any, **more: Any) -> dict[str, Any]:
    return {"layers": ["l"], "kind": "full", "shape": shape, "order": order, **more}


@pytest.mark.parametrize(
    ("tree", "layout"),
    [
        ({"kv_dtype": "bfloat16"}, Layout("bfloat16")),
        ({"kv_dtype": "torch.float16"}, Layout("float16")),
        ({"kv_dtype": "auto", "extras": {"dtype": "torch.bfloat16"}}, Layout("bfloat16")),
        ({"kv_dtype": "auto"}, UNKNOWN),
        ({"kv_dtype": "fp8_e4m3", "extras": {"dtype": "torch.bfloat16"}}, UNKNOWN),
        ({"kv_dtype": 7}, UNKNOWN),
        ({}, UNKNOWN),
        ({"kv_dtype": "half", "groups": [_group([2, 16, 8, 64], "kv,token,head,dim")]}, Layout("float16", 16, 512)),
        ({"kv_dtype": "half", "groups": [_group([16, 8], "token, dim")] * 2}, Layout("float16", 16, 8)),
        (
            {"kv_dtype": "half", "groups": [_group([16, 8], "token,dim"), _group([8, 8], "token,dim")]},
            Layout("float16"),
        ),
        ({"kv_dtype": "half", "groups": [_group([16, 8], "token,dim", strides=[1, 2])]}, Layout("float16")),
        ({"kv_dtype": "half", "groups": [_group([16, -8], "token,dim")]}, Layout("float16")),
        ({"kv_dtype": "half", "groups": [_group([16, True], "token,dim")]}, Layout("float16")),
        ({"kv_dtype": "half", "groups": [_group([16, 1 << 60], "token,dim")]}, Layout("float16")),
        ({"kv_dtype": "half", "groups": [_group([16, 8], "block,dim")]}, Layout("float16")),
        ({"kv_dtype": "half", "groups": "many"}, Layout("float16")),
        ({"kv_dtype": "half", "groups": [7]}, Layout("float16")),
    ],
)
def test_a_manifest_says_what_the_numbers_are(tree: dict[str, Any], layout: Layout) -> None:
    assert layout_of(json.dumps(tree).encode()) == layout


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"kv_dtype": null}'])
def test_a_manifest_that_is_none_says_nothing(text: bytes) -> None:
    assert layout_of(text) == UNKNOWN


# ---- zstd ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 1000, 4097])
def test_planes_come_together_again(width: int, length: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(length)
    into = memoryview(bytearray(length))
    merge(planes(memoryview(data), width).tobytes(), into, width)
    assert bytes(into) == data


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1.10), ("float16", 1.04)])
def test_planes_beat_zstd_alone_on_kv(dtype: str, least: float) -> None:
    plain = kv(key(1), 1 << 20, dtype)
    serde = Zstd(Options("serde zstd", {}))
    serde.open()
    split = len(serde.encode(memoryview(plain), Context(key(1), len(plain), Layout(dtype), b"")).data)
    alone = len(zstandard.ZstdCompressor(level=1).compress(plain))
    print(f"{dtype}: {len(plain) / split:.3f} with planes, {len(plain) / alone:.3f} without")
    assert alone / split > least


def test_what_does_not_shrink_is_stored_as_it_is(tmp_path: Path, seed: int) -> None:
    mine = codec(["zstd"], tmp_path)
    item = Item(key(1), view(np.random.default_rng(seed).bytes(SIZE)), 5)
    plain = item._replace(checksum=0)
    assert mine.encode(plain) is plain
    assert mine.counters["serde_zstd_passed_over"] == 1


def test_a_frame_that_claims_to_be_large_costs_nothing() -> None:
    """Ten bytes that say "an exabyte follows" must not be believed."""
    serde = Zstd(Options("serde zstd", {}))
    serde.open()
    header = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 60)
    into = memoryview(bytearray(100))
    for data in (header, header + bytes(50), zstandard.compress(bytes(101)), b"", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(Undecodable):
            serde.decode(memoryview(data), b"\1", into, Context(key(1), 100, UNKNOWN, b""))


# ---- aesgcm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "mode", "says"),
    [
        ([KEY_A], 0o640, "mode 0640; it must be the daemon's user's or root's, with 0600"),
        ([KEY_A], 0o604, "mode 0604"),
        (["# nothing"], 0o600, "has no key"),
        ([KEY_A, KEY_A], 0o600, "line 2 .* has the id of an earlier line"),
        ([KEY_A[:-2]], 0o600, "line 1 .* is not 'id:hex'"),
        (["", KEY_A, "b=" + "00" * 32], 0o600, "line 3 .* is not 'id:hex'"),
        (["x" * 17 + ":" + "00" * 32], 0o600, "line 1"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_one_sentence_without_keys(
    tmp_path: Path, lines: list[str], mode: int, says: str
) -> None:
    with pytest.raises(AdapterError, match=says) as caught:
        read_keys(str(key_file(tmp_path, *lines, mode=mode)))
    assert "0f0f" not in str(caught.value)
    assert "0000" not in str(caught.value)


def test_a_key_file_that_is_not_there_or_no_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))
    with pytest.raises(AdapterError, match="not a file"):
        read_keys(str(tmp_path))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(AdapterError, match="not a file"):
        read_keys(str(tmp_path / "fifo"))


def test_a_key_file_has_comments_and_an_order(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# new", KEY_B, "", KEY_A.upper().replace("A:", "a:", 1))
    assert list(read_keys(str(path))) == [b"b", b"a"]


def test_what_is_at_rest_shows_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    mine = codec(["aesgcm"], tmp_path)
    plain = bytes(SIZE)
    items = [mine.encode(Item(key(1), view(plain))) for _ in range(2)]
    assert items[0].payload != items[1].payload
    assert all(len(item.payload) == SIZE + 16 for item in items)
    assert all(len(zstandard.compress(bytes(item.payload))) > SIZE for item in items)


@pytest.mark.parametrize("chain", [["aesgcm"], ["fp8", "aesgcm"], ["aesgcm", "zstd"], ["zstd", "aesgcm", "zstd"]])
def test_an_object_that_was_moved_under_another_key_does_not_decode(tmp_path: Path, chain: list[str]) -> None:
    mine = codec(chain, tmp_path)
    there = at_rest(mine.encode(Item(key(1, shards=2), view(kv(key(1), SIZE)))))
    mine.learn(bytes(32), manifest())
    assert load(mine, there, key(1, shards=2))[0] == Outcome.OK
    others = [key(2, shards=2), key(1, shard=1, shards=2), key(1), key(1, shards=2, namespace=bytes(32))]
    assert [load(mine, there, other)[0] for other in others] == [Outcome.CORRUPT] * 4


def test_a_header_that_was_rewritten_does_not_decode(tmp_path: Path) -> None:
    """Whoever can write to the medium can make any header and any checksum; with a key it helps nothing."""
    mine = codec(["fp8", "aesgcm"], tmp_path)
    item = mine.encode(Item(key(1), view(kv(key(1), SIZE))))
    assert item.encoding is not None
    encoding, seen = item.encoding, set()
    for at in range(len(encoding.params)):
        params = bytearray(encoding.params)
        params[at] ^= 1
        outcome, _ = load(mine, at_rest(item._replace(encoding=encoding._replace(params=bytes(params)))))
        assert outcome in (Outcome.CORRUPT, Outcome.MISS)  # MISS: it names a key that is not there
        seen.add(outcome)
    assert seen == {Outcome.CORRUPT, Outcome.MISS}
    for serdes in ((3,), (3, 2), (2, 3, 1), (1, 3), (2, 3, 3)):
        assert load(mine, at_rest(item._replace(encoding=encoding._replace(serdes=serdes))))[0] == Outcome.CORRUPT
    shorter = at_rest(item._replace(encoding=encoding._replace(original_bytes=SIZE - 2)))
    assert load(mine, shorter, size=SIZE - 2)[0] == Outcome.CORRUPT


def test_nothing_of_a_key_is_in_a_log_or_a_counter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    mine, other = codec(["aesgcm"], tmp_path), codec(["aesgcm"], tmp_path, KEY_B)
    item = mine.encode(Item(key(1), view(bytes(SIZE))))
    load(other, at_rest(item))
    load(mine, at_rest(item), key(2))
    said = caplog.text + repr(mine.counters) + repr(other.counters) + repr(vars(mine)) + repr(vars(mine.chain[0]))
    assert "key b'a' is not in" in caplog.text
    assert "0f0f" not in said.lower()
    assert "3737" not in said


# ---- chains and changed configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS, ids="+".join)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_chain_in_any_order_is_undone_by_the_header_alone(tmp_path: Path, chain: list[str], dtype: str) -> None:
    plain = kv(key(1), SIZE, dtype)
    item = codec(chain, tmp_path, dtype=dtype).encode(Item(key(1), view(plain), payload_checksum(plain)))
    assert load(Codec(), at_rest(item))[0] == (Outcome.MISS if "aesgcm" in chain else Outcome.OK)
    by = Codec(chain_of({"serde": config_of(["aesgcm"], tmp_path / "keys")}))
    by.open()
    outcome, back = load(by, at_rest(item))
    assert outcome == Outcome.OK
    assert within_bound(plain, back, dtype) if chain[0] == "fp8" else back == plain


def test_a_changed_configuration_reads_what_it_can_and_keeps_the_rest(tmp_path: Path) -> None:
    plain = kv(key(1), SIZE)
    item = Item(key(1), view(plain))
    stored = {
        "none": at_rest(item),
        "zstd": at_rest(codec(["zstd"], tmp_path).encode(item)),
        "a": at_rest(codec(["aesgcm"], tmp_path).encode(item)),
        "b": at_rest(codec(["aesgcm"], tmp_path, KEY_B).encode(item)),
    }
    readers = {
        "none": Codec(),
        "zstd": codec(["zstd"], tmp_path),
        "a": codec(["aesgcm"], tmp_path),
        "rotated": codec(["aesgcm"], tmp_path, KEY_B, KEY_A),
    }
    good = {"none": {"none", "zstd"}, "zstd": {"none", "zstd"}, "a": {"none", "zstd", "a"}, "rotated": set(stored)}
    for name, reader in readers.items():
        for what, there in stored.items():
            outcome, back = load(reader, there)
            assert outcome == (Outcome.OK if what in good[name] else Outcome.MISS), (name, what)
            assert outcome == Outcome.MISS or back == plain
    assert readers["none"].counters["serde_unreadable"] == 2
    assert readers["a"].counters["serde_unreadable"] == 1


def test_two_key_files_in_one_chain_are_both_tried(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    files = [key_file(tmp_path / "one", KEY_A), key_file(tmp_path / "two", KEY_B)]
    mine = Codec(chain_of({"serde": [{"type": "aesgcm", "key_file": str(file)} for file in files]}))
    mine.open()
    item = mine.encode(Item(key(1), view(kv(key(1), SIZE))))
    assert load(mine, at_rest(item)) == (Outcome.OK, kv(key(1), SIZE))


def test_a_number_that_nobody_has_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Fetched(OK, memoryview(bytes(10)), Encoding(SIZE, (999,), struct.pack("<IB", SIZE, 0)))
    mine = Codec()
    assert [load(mine, there)[0] for _ in range(3)] == [Outcome.MISS] * 3
    assert caplog.text.count("no serde here has the number 999") == 1, "said once"


def test_a_namespace_of_other_numbers_skips_fp8_and_keeps_the_rest_of_the_chain(tmp_path: Path) -> None:
    mine = codec(["fp8", "aesgcm"], tmp_path)
    foreign = key(1, namespace=bytes(32))
    for text in (None, manifest("float32"), manifest("fp8_e4m3"), b"rubbish"):
        if text is not None:
            mine.learn(bytes(32), text)
        item = mine.encode(Item(foreign, view(kv(foreign, SIZE))))
        assert item.encoding is not None
        assert item.encoding.serdes == (3,), "encrypted all the same"
        assert load(mine, at_rest(item), foreign) == (Outcome.OK, kv(foreign, SIZE))
    assert mine.counters["serde_fp8_passed_over"] == 4


def test_a_payload_that_changed_in_l1_is_not_stored(tmp_path: Path) -> None:
    mine = codec(["zstd"], tmp_path)
    plain = kv(key(1), SIZE)
    with pytest.raises(NotEncoded) as caught:
        mine.encode(Item(key(1), view(plain), payload_checksum(plain) ^ 1))
    assert caught.value.result.outcome == Outcome.CORRUPT


def test_only_so_many_namespaces_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.l2.serde_codec.MAX_LAYOUTS", 3)
    mine = Codec()
    for number in range(5):
        mine.learn(bytes([number]) * 32, manifest())
    assert list(mine._layouts) == [bytes([n]) * 32 for n in (2, 3, 4)]


# ---- whatever is at rest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [("zstd",), ("fp8",), ("aesgcm",), ("fp8", "zstd", "aesgcm"), ("zstd", "fp8")])
def test_damage_of_any_kind_is_a_miss_or_the_right_bytes(tmp_path: Path, chain: tuple[str, ...], seed: int) -> None:
    """Below the record's checksum, which finds all of this first: bytes, parameters, lengths and chains at random."""
    random = np.random.default_rng(seed)
    mine = codec(chain, tmp_path)
    size = 8 << 10
    plain = kv(key(1), size)
    item = mine.encode(Item(key(1), view(plain)))
    good = load(mine, at_rest(item), size=size)[1]
    assert item.encoding is not None
    outcomes = set()
    for _ in range(600):
        data, params, serdes = bytearray(item.payload), bytearray(item.encoding.params), list(item.encoding.serdes)
        kind = random.integers(5)
        if kind == 0:
            data[random.integers(len(data))] ^= 1 << int(random.integers(8))
        elif kind == 1:
            data = data[: random.integers(len(data))]
        elif kind == 2:
            params[random.integers(len(params))] ^= 1 << int(random.integers(8))
        elif kind == 3:
            serdes = [int(n) for n in random.integers(1, 5, random.integers(1, 5))]
        else:
            data, params = bytearray(random.bytes(len(data))), bytearray(random.bytes(len(params)))
        there = Fetched(OK, memoryview(data), Encoding(size, tuple(serdes), bytes(params)))
        outcome, back = load(mine, at_rest_of(there), size=size)
        assert outcome in (Outcome.OK, Outcome.MISS, Outcome.CORRUPT)
        outcomes.add(outcome)
        # Without a tag or a sum of its own, fp8 takes any bytes for numbers: that is the record's checksum to find.
        if outcome == Outcome.OK and "fp8" not in chain and chain != ("zstd",):
            assert back == good
    assert Outcome.CORRUPT in outcomes
    assert mine.counters["serde_failed"] == 0


def at_rest_of(fetched: Fetched) -> Fetched:
    assert fetched.encoding is not None
    params = fetched.encoding.params.ljust(SERDE_PARAM_BYTES, b"\0")
    return fetched._replace(encoding=fetched.encoding._replace(params=params))


@pytest.mark.parametrize(
    "encoding",
    [
        Encoding(SIZE, (1,), b""),
        Encoding(SIZE, (1,), struct.pack("<IB", SIZE, 92).ljust(96, b"\0")),
        Encoding(SIZE, (1,), struct.pack("<IB", SIZE - 1, 0)),
        Encoding(SIZE, (1, 1), struct.pack("<IBIB", SIZE, 0, 0xFFFFFFFF, 0)),
        Encoding(SIZE, (), b""),
    ],
)
def test_a_header_that_contradicts_itself_is_undecodable(encoding: Encoding) -> None:
    with pytest.raises(Undecodable):
        steps_of(encoding)


def test_another_length_than_was_asked_for_is_a_miss(tmp_path: Path) -> None:
    mine = codec(["zstd"], tmp_path)
    there = at_rest(mine.encode(Item(key(1), view(kv(key(1), SIZE)))))
    assert load(mine, there, size=SIZE + 2)[0] == Outcome.MISS
    assert load(mine, Fetched(OK, view(b"12345")), size=6)[0] == Outcome.MISS
    assert load(mine, Fetched(OK, view(b"12345")), size=5) == (Outcome.OK, b"12345")
