"""A digest that tells two sets of weights apart without reading all of them.

A revision that is a commit says enough.  For a folder on disk: names and sizes of the weight files, and for each
safetensors file its header and a sample from the middle of each tensor.  Names, sizes and headers alone would not do:
two fine-tunes of one model have all three in common, and KV of one must never be served to the other.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
MAX_HEADER_BYTES = 100 << 20
MAX_SAMPLES = 4096  # per file
SAMPLE_BYTES = 512
_COMMIT = re.compile(r"[0-9a-f]{40}")


class NoFingerprint(Exception):
    """One sentence: why the weights cannot be told apart from others."""


def weights(model: str, revision: str | None, load_format: str, seed: int) -> str:
    """The fingerprint of what an engine loads.  Raises NoFingerprint."""
    if load_format == "dummy":
        return f"dummy:{seed}"
    folder = Path(model)
    if not folder.is_dir():
        folder = _cached_snapshot(model, revision)
        if _COMMIT.fullmatch(folder.name):
            return f"commit:{folder.name}"
    return f"files:{of_folder(folder)}"


def of_folder(folder: Path) -> str:
    digest = blake3()
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if not files:
        raise NoFingerprint(f"no weight files ({', '.join(WEIGHT_SUFFIXES)}) in {folder}: the model has no identity")
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for sample in _safetensors(path) if path.suffix == ".safetensors" else _spread(path):
            digest.update(sample)
    return digest.hexdigest()


def _cached_snapshot(model: str, revision: str | None) -> Path:
    """The folder of the Hugging Face cache that the engine loaded from; no network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not even a name of a repository
        found = None
    if not isinstance(found, str):
        raise NoFingerprint(f"the files of model {model!r} are not in the local cache: give a folder as the model")
    return Path(found).parent


def _safetensors(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > min(MAX_HEADER_BYTES, path.stat().st_size):
            raise NoFingerprint(f"{path} is not a safetensors file (header of {length} bytes)")
        header = file.read(length)
        yield header
        try:
            tensors = msgspec.json.decode(header, type=dict[str, dict[str, object]])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise NoFingerprint(f"{path} is not a safetensors file ({error})") from None
        spans = [tensor["data_offsets"] for name, tensor in sorted(tensors.items()) if name != "__metadata__"]
        for span in spans[:: max(1, -(-len(spans) // MAX_SAMPLES))]:
            begin, end = span  # type: ignore[misc]
            file.seek(8 + length + max(begin, (begin + end - SAMPLE_BYTES) // 2))  # type: ignore[has-type]
            yield file.read(min(SAMPLE_BYTES, end - begin))  # type: ignore[has-type]


def _spread(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for at in range(0, size, max(SAMPLE_BYTES, size // MAX_SAMPLES)):
            file.seek(at)
            yield file.read(SAMPLE_BYTES)
