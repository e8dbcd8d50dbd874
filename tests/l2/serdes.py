"""What tests of serdes share: payloads that look like KV, what a lossy chain may do to them, key files, chains."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.l2.adapter import Key
from kvkeep.l2.serde import chain_of
from kvkeep.l2.serde_codec import Codec
from kvkeep.l2.serde_fp8 import BLOCK

KEY_A, KEY_B = "a:" + "0f" * 32, "b:" + "37" * 32
CHAINS = [
    chain for n in (1, 2, 3) for chain in itertools.permutations(("zstd", "fp8", "aesgcm"), n)
]  # every serde, alone and in every order

Words = npt.NDArray[np.uint16]


def manifest(dtype: str = "bfloat16", **more: Any) -> bytes:
    return json.dumps({"model": "m", "kv_dtype": dtype, **more}).encode()


def kv(key: Key | bytes, length: int, dtype: str = "bfloat16") -> bytes:
    """``length`` bytes that follow from the key: a value for each channel, tokens scattered around it, a few channels
    that are far out, as the K of real models has them."""
    seed = [*(key.chunk if isinstance(key, Key) else key), 7]
    random = np.random.default_rng(seed)
    channels = 64
    rows = -(-length // (2 * channels))
    spread = np.exp(random.normal(0, 1, channels)) * np.where(random.random(channels) < 0.06, 20, 1)
    values = (random.normal(0, 0.3, channels) + random.normal(0, 1, (rows, channels))) * spread
    return to_words(values.reshape(-1), dtype).tobytes()[:length]


def to_words(values: npt.NDArray[Any], dtype: str) -> Words:
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        return (single.view(np.uint32) >> 16).astype(np.uint16)
    return single.astype(np.float16).view(np.uint16)


def floats(data: bytes | Words, dtype: str) -> npt.NDArray[np.float64]:
    words = np.frombuffer(data, "<u2") if isinstance(data, bytes) else data
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return words.view(np.float16).astype(np.float64)


def within_bound(
    plain: bytes | Words, back: bytes | Words, dtype: str = "bfloat16", tokens: int = BLOCK, channels: int = 1
) -> bool:
    """The bound that serde_fp8 states, for every number."""
    x, y = floats(plain, dtype), floats(back, dtype)
    whole = len(x) // (tokens * channels) * tokens * channels
    largest = np.abs(x[:whole]).reshape(-1, tokens, channels).max(axis=1, keepdims=True)
    most = np.broadcast_to(largest, (len(largest), tokens, channels)).reshape(-1)
    if whole < len(x):
        most = np.concatenate([most, np.full(len(x) - whole, np.abs(x[whole:]).max())])
    bound = np.maximum(2.0**-4 * np.abs(x), 2.0**-17 * most)
    if dtype == "bfloat16":
        bound = np.where((np.abs(x) < 2.0**-126) | (most < 2.0**-109), np.maximum(bound, np.abs(x)), bound)
    return bool((np.abs(y - x) <= bound).all() and np.isfinite(y).all() and (np.signbit(x) == np.signbit(y)).all())


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.unlink(missing_ok=True)
    path.write_text("".join(line + "\n" for line in lines or (KEY_A,)))
    os.chmod(path, mode)
    return path


def config_of(chain: Iterable[str], keys: Path) -> list[Any]:
    return [{"type": "aesgcm", "key_file": str(keys)} if name == "aesgcm" else name for name in chain]


def codec(
    chain: Iterable[str], folder: Path, *lines: str, dtype: str = "bfloat16", namespace: bytes = bytes(range(32))
) -> Codec:
    """Open, and told what the namespace holds.  ``lines`` are those of the key file."""
    made = Codec(chain_of({"serde": config_of(chain, key_file(folder, *lines))}))
    made.open()
    made.learn(namespace, manifest(dtype))
    return made
