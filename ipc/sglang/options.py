"""The ``kvkeep.*`` keys of SGLang's --hicache-storage-backend-extra-config, parsed once and then trusted.

Keys without the prefix are SGLang's own, or somebody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "kvkeep."


@dataclass(frozen=True)
class Options:
    """What each field does is in docs/sglang.md; the defaults here are the ones that work."""

    run_dir: str = ""  # of the daemon; "" = $KVKEEP_RUN_DIR, or from $KVKEEP_NAME
    identity: str = ""  # names the weights where they cannot be fingerprinted, and separates caches
    lookup_deadline_ms: float = 1000.0
    l2_wait_ms: float = 1000.0  # on top of it, when the daemon has L2
    transfer_deadline_s: float = 5.0  # of one batch of loads or stores; a copy that has begun is finished
    copy_threads: int = 2


_RANGES: dict[str, tuple[float, float]] = {
    "lookup_deadline_ms": (1, 60_000),
    "l2_wait_ms": (0, 60_000),
    "transfer_deadline_s": (0.001, 3600),
    "copy_threads": (1, 64),
}


def parse(extra: Mapping[str, object] | None) -> Options:
    """Raises ValueError: one sentence with key, value and what is allowed."""
    known = Options.__dataclass_fields__
    values: dict[str, object] = {}
    for key, value in (extra or {}).items():
        if not isinstance(key, str) or not key.startswith(PREFIX):
            continue
        field = key[len(PREFIX) :]
        if field not in known:
            names = ", ".join(PREFIX + name for name in known)
            raise ValueError(f"unknown option {key!r} in the storage backend's extra config: the options are {names}")
        values[field] = _checked(key, field, value, type(known[field].default))
    return Options(**values)  # type: ignore[arg-type]


def _checked(key: str, field: str, value: object, wanted: type) -> object:
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{key} is {value!r}: it must be of type {wanted.__name__}")
    if field in _RANGES:
        low, high = _RANGES[field]
        if not low <= value <= high:  # type: ignore[operator]
            raise ValueError(f"{key} is {value!r}: it must be between {low} and {high}")
    return value
