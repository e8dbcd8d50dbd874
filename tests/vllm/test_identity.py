"""Change one thing that the bytes depend on, and it is another namespace; what we cannot name is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvkeep.ipc.keys import canonical
from kvkeep.ipc.vllm import fingerprint, identity

LAYOUT = {
    "groups": [{"planes": [{"layers": 3, "page_bytes": 16384}]}],
    "platform": "cpu",
    "backends": ["CPU_ATTN"],
    "cpu": "x86_64",
}


def write_weights(folder: Path, *, value: int = 1, name: str = "model.safetensors") -> None:
    body = bytes([value]) * 4096
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + body)


def engine(folder: Path) -> tuple[Any, Any]:
    """The parts of VllmConfig and KVCacheConfig that matter here."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    group = SimpleNamespace(
        kv_cache_spec=spec,
        layer_names=["l.0", "l.1", "l.2"],
        enable_kv_transfer=True,
        host_resident=False,
        is_eagle_group=False,
    )
    hf = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    model = SimpleNamespace(
        model=str(folder),
        revision=None,
        seed=0,
        dtype=torch.float32,
        quantization=None,
        max_model_len=2048,
        hf_config=SimpleNamespace(tree=hf, to_dict=lambda: hf),
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    kv = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC", hash_block_size=32, kv_tp_replicas=1)
    return config, kv


def digest(config: Any, kv: Any, layout: dict[str, Any] = LAYOUT, chunk: int = 256, epoch: str = "") -> bytes:
    return canonical(identity.manifest(config, kv, layout, chunk, epoch))


def sliding(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=window)


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "model": lambda c, k: setattr(c.model_config, "model", c.model_config.model + "/other"),
    "revision": lambda c, k: setattr(c.model_config, "revision", "main"),
    "dtype": lambda c, k: setattr(c.model_config, "dtype", torch.bfloat16),
    "quantization": lambda c, k: setattr(c.model_config, "quantization", "fp8"),
    "rope": lambda c, k: c.model_config.hf_config.tree["rope_parameters"].update(rope_theta=20000.0),
    "kv dtype": lambda c, k: setattr(c.cache_config, "cache_dtype", "fp8"),
    "hash algorithm": lambda c, k: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "tensor parallel": lambda c, k: setattr(c.parallel_config, "tensor_parallel_size", 2),
    "pipeline parallel": lambda c, k: setattr(c.parallel_config, "pipeline_parallel_size", 2),
    "context parallel": lambda c, k: setattr(c.parallel_config, "decode_context_parallel_size", 2),
    "layout": lambda c, k: setattr(k, "kv_cache_layout", "LBNHC"),
    "hash block size": lambda c, k: setattr(k, "hash_block_size", 16),
    "one more group": lambda c, k: k.kv_cache_groups.append(k.kv_cache_groups[0]),
    "a sliding window": lambda c, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", sliding(128)),
    "ranks with the same KV": lambda c, k: setattr(k, "kv_tp_replicas", 2),
    "layers": lambda c, k: k.kv_cache_groups[0].layer_names.append("l.3"),
    "heads": lambda c, k: setattr(
        k.kv_cache_groups[0],
        "kv_cache_spec",
        FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=16, dtype=torch.float32),
    ),
    "block size": lambda c, k: setattr(
        k.kv_cache_groups[0],
        "kv_cache_spec",
        FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.float32),
    ),
    "weights": lambda c, k: write_weights(Path(c.model_config.model), value=2),
    "one more file": lambda c, k: write_weights(Path(c.model_config.model), name="more.safetensors"),
    "dummy weights": lambda c, k: setattr(c.load_config, "load_format", "dummy"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_is_another_namespace(tmp_path: Path, change: str) -> None:
    write_weights(tmp_path)
    (tmp_path / "other").mkdir()
    write_weights(tmp_path / "other")
    config, kv = engine(tmp_path)
    before = digest(config, kv)
    assert digest(*engine(tmp_path)) == before
    CHANGES[change](config, kv)
    assert digest(config, kv) != before


def test_what_the_worker_found_the_chunk_and_the_epoch_are_part_of_it(tmp_path: Path) -> None:
    write_weights(tmp_path)
    config, kv = engine(tmp_path)
    found = {digest(config, kv), digest(config, kv, chunk=512), digest(config, kv, epoch="1-aa")}
    for key in LAYOUT:
        found.add(digest(config, kv, LAYOUT | {key: ["other"]}))
    assert len(found) == 3 + len(LAYOUT)


def test_the_seed_of_block_hashes_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path)
    config, kv = engine(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = digest(config, kv)
    monkeypatch.setenv("PYTHONHASHSEED", "secret-seed")
    assert digest(config, kv) != before
    assert b"secret-seed" not in digest(config, kv)


def test_the_longest_context_matters_where_rotary_embeddings_depend_on_it(tmp_path: Path) -> None:
    write_weights(tmp_path)
    for kind, matters in (("default", False), ("longrope", True)):
        config, kv = engine(tmp_path)
        config.model_config.hf_config.tree["rope_parameters"]["rope_type"] = kind
        before = digest(config, kv)
        config.model_config.max_model_len = 4096
        assert (digest(config, kv) != before) is matters


def recurrent(config: Any, kv: Any) -> None:
    other = MambaSpec(block_size=32, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
    kv.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=other, layer_names=["l.3"]))


REFUSALS: dict[str, Callable[[Any, Any], None]] = {
    "has recurrent state (MambaSpec)": recurrent,
    "on 2 nodes": lambda c, k: setattr(c.parallel_config, "nnodes_within_dp", 2),
    "pipeline_parallel_size is 2": lambda c, k: setattr(c.parallel_config, "pipeline_parallel_size", 2),
    "decode_context_parallel_size is 2": lambda c, k: setattr(c.parallel_config, "decode_context_parallel_size", 2),
    "whose seed is random": lambda c, k: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"),
    "calculate_kv_scales": lambda c, k: setattr(c.cache_config, "calculate_kv_scales", True),
    "kv_cache_dtype is nvfp4": lambda c, k: setattr(c.cache_config, "cache_dtype", "nvfp4"),
    "layout LHBNC is unknown": lambda c, k: setattr(k, "kv_cache_layout", "LHBNC"),
    "layout None is unknown": lambda c, k: setattr(k, "kv_cache_layout", None),
    "speculative decoding with dflash": lambda c, k: setattr(c, "speculative_config", SimpleNamespace(method="dflash")),
    "external transfer": lambda c, k: setattr(k.kv_cache_groups[0], "enable_kv_transfer", False),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_this_version_does_not_cache_is_refused_in_one_sentence(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config, kv = engine(tmp_path)
    assert identity.refusal(config, kv) == ""
    REFUSALS[words](config, kv)
    sentence = identity.refusal(config, kv)
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("dtype", identity.PAGE_DTYPES)
def test_scales_that_lie_in_the_pages_are_stored_with_them(tmp_path: Path, dtype: str) -> None:
    config, kv = engine(tmp_path)
    config.cache_config.cache_dtype = dtype
    assert identity.refusal(config, kv) == ""


def test_a_draft_model_and_its_weights_are_part_of_it(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        folder.mkdir()
        write_weights(folder)
    config, kv = engine(target)
    found = {digest(config, kv)}
    config.speculative_config = SimpleNamespace(method="ngram", draft_model_config=None)
    assert digest(config, kv) in found
    config.speculative_config = SimpleNamespace(
        method="draft_model",
        draft_model_config=engine(draft)[0].model_config,
        draft_load_config=None,
        use_eagle_block_drop=lambda: False,
    )
    assert identity.refusal(config, kv) == ""
    found.add(digest(config, kv))
    write_weights(draft, value=2)
    found.add(digest(config, kv))
    config.speculative_config.method = "eagle"
    found.add(digest(config, kv))
    assert len(found) == 4


def test_xxhash_with_a_common_seed_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, kv = engine(tmp_path)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert identity.refusal(config, kv) == ""


@pytest.mark.parametrize("chunk", [0, 33, 100, -64])
def test_a_chunk_that_is_not_whole_blocks_is_refused(chunk: int) -> None:
    assert "kvkeep.chunk_tokens" in identity.refused_chunk(chunk, 32)
    assert identity.refused_chunk(256, 32) == ""


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_copy_of_the_weights_has_the_same_fingerprint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name)
    assert fingerprint.of_folder(tmp_path / "one") == fingerprint.of_folder(tmp_path / "two")


def test_other_weights_of_the_same_shape_have_another(tmp_path: Path) -> None:
    write_weights(tmp_path, value=1)
    before = fingerprint.of_folder(tmp_path)
    write_weights(tmp_path, value=2)
    assert fingerprint.of_folder(tmp_path) != before


def test_one_changed_tensor_among_many_is_seen(tmp_path: Path) -> None:
    def write(values: list[int]) -> str:
        tensors = {f"w{n}": {"data_offsets": [n * 100, n * 100 + 100]} for n in range(len(values))}
        header = json.dumps(tensors | {"__metadata__": {"format": "pt"}}).encode()
        body = b"".join(bytes([value]) * 100 for value in values)
        (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + body)
        return fingerprint.of_folder(tmp_path)

    first = [1] * 300
    for n in (0, 150, 299):
        assert write(first) != write([*first[:n], 9, *first[n + 1 :]])


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, struct.pack("<Q", 1 << 50) + b"{}", struct.pack("<Q", 2) + b"[]"]
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(fingerprint.NoFingerprint, match="not a safetensors file"):
        fingerprint.of_folder(tmp_path)


def test_a_model_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fingerprint.NoFingerprint, match="no weight files"):
        fingerprint.weights(str(tmp_path), None, "auto", 0)
    with pytest.raises(fingerprint.NoFingerprint, match="not in the local cache"):
        fingerprint.weights("nobody/nothing-at-all", None, "auto", 0)
    with pytest.raises(fingerprint.NoFingerprint, match="not in the local cache"):
        fingerprint.weights("/no/such/folder/at/all", None, "auto", 0)


def test_dummy_weights_are_told_apart_by_their_seed(tmp_path: Path) -> None:
    assert fingerprint.weights(str(tmp_path), None, "dummy", 1) != fingerprint.weights(str(tmp_path), None, "dummy", 2)
