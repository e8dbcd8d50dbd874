"""What serdes make of KV: how small it gets, and how fast one thread of a mover encodes and decodes it.

    <chain>/<dtype>/size       times that the plain bytes are more than what is stored; beside what zstd alone makes of
                               the same bytes, without looking at them as numbers
    <chain>/<dtype>/encode     GB/s of plain bytes, one thread, beside a plain copy of them
    <chain>/<dtype>/decode

The bytes are made here: channels with a mean, a spread, and a few that are far out, tokens normal around them.  With
``--data FILE`` they are the file's, which holds nothing but numbers of ``--dtype``: KV of a model that somebody dumped.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkeep.bench.common import BenchError, Report, arguments, run
from kvkeep.l2.adapter import OK, AdapterError, Fetched, Item, Key, Outcome
from kvkeep.l2.serde import chain_of
from kvkeep.l2.serde_codec import Codec

OBJECT = 4 << 20
RUNS = 7
CHAINS = (("zstd",), ("fp8",), ("aesgcm",), ("fp8", "zstd"), ("zstd", "aesgcm"), ("fp8", "zstd", "aesgcm"))
DTYPES = ("bfloat16", "float16")
CHANNELS = 1024
NAMESPACE = bytes(32)

Words = npt.NDArray[np.uint16]


def main(argv: Sequence[str] | None = None) -> int:
    more = (
        ("--data", {"default": "", "metavar": "FILE", "help": "numbers to take instead of made ones"}),
        ("--dtype", {"default": "bfloat16", "choices": DTYPES, "help": "of --data (default: %(default)s)"}),
    )
    return run("serde", measure, arguments("serde", __doc__ or "", argv, *more))


def measure(args: argparse.Namespace) -> None:
    report = Report(args, "serdes, one thread")
    for dtype in (args.dtype,) if args.data else DTYPES:
        words = _given(args.data) if args.data else made(args.seed, dtype, OBJECT // (16 if args.quick else 1))
        for chain in CHAINS:
            name = f"{'+'.join(chain)}/{dtype}"
            if report.wanted(args, *(f"{name}/{what}" for what in ("size", "encode", "decode"))):
                _measure(report, args, name, chain, dtype, words)


def _given(path: str) -> Words:
    try:
        data = Path(path).read_bytes()[: 64 << 20]
    except OSError as error:
        raise BenchError(f"--data {path} cannot be read ({error.strerror})") from None
    if len(data) < 2:
        raise BenchError(f"--data {path} holds {len(data)} bytes, not a single number")
    return np.frombuffer(data[: len(data) // 2 * 2], np.uint16)


def made(seed: int, dtype: str, nbytes: int) -> Words:
    random = np.random.default_rng(seed)
    spread = np.exp(random.normal(0, 1, CHANNELS)) * np.where(random.random(CHANNELS) < 0.05, 20, 1)
    mean = random.normal(0, 0.3, CHANNELS)
    rows = nbytes // 2 // CHANNELS
    values = ((mean + random.normal(0, 1, (rows, CHANNELS))) * spread).astype(np.float32).reshape(-1)
    half = dtype == "float16"
    words: Words = values.astype(np.float16).view(np.uint16) if half else (values.view("<u4") >> 16).astype(np.uint16)
    return words


def _measure(
    report: Report, args: argparse.Namespace, name: str, chain: tuple[str, ...], dtype: str, words: Words
) -> None:
    try:
        codec = _codec(chain, dtype)
    except AdapterError as problem:  # a package is not installed
        for what, unit in (("size", "x"), ("encode", "GB/s"), ("decode", "GB/s")):
            report.missing(f"{name}/{what}", unit, str(problem))
        return
    plain = memoryview(words.tobytes())
    into = memoryview(bytearray(len(plain)))
    item = Item(Key(NAMESPACE, bytes(32), 0, 1), plain)
    encoded = codec.encode(item)
    fetched = Fetched(OK, encoded.payload, encoded.encoding)
    if codec.decode(item.key, fetched, into).outcome != Outcome.OK or ("fp8" not in chain and into != plain):
        raise BenchError(f"{name}: what was decoded is not what was encoded")
    runs = 2 if args.quick else RUNS
    alone = _zstd_alone(plain)
    report.case(
        f"{name}/size", len(plain) / len(encoded.payload), "x", reference=alone, reference_name="zstd alone, same bytes"
    )
    for what, work in (
        ("encode", lambda: codec.encode(item)),
        ("decode", lambda: codec.decode(item.key, fetched, into)),
    ):
        times = [(_seconds(work), _seconds(lambda: into.__setitem__(slice(None), plain))) for _ in range(runs)]
        value, copy = (len(plain) / min(column) / 1e9 for column in zip(*times, strict=True))
        report.case(f"{name}/{what}", value, "GB/s", reference=copy, reference_name="copy of the same bytes", runs=runs)


def _codec(chain: tuple[str, ...], dtype: str) -> Codec:
    with tempfile.NamedTemporaryFile("w", prefix="kvkeep-bench-") as keys:  # mode 0600
        keys.write(f"bench:{os.urandom(32).hex()}\n")
        keys.flush()
        config = [{"type": n, "key_file": keys.name} if n == "aesgcm" else n for n in chain]
        codec = Codec(chain_of({"serde": config}))
        codec.open()
    codec.learn(NAMESPACE, b'{"kv_dtype":"%s"}' % dtype.encode())
    return codec


def _zstd_alone(plain: memoryview) -> float | None:
    try:
        import zstandard
    except ImportError:
        return None
    return len(plain) / len(zstandard.ZstdCompressor(level=1).compress(plain))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
