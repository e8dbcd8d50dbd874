"""The ``kvkeep.*`` keys of vLLM's kv_connector_extra_config, parsed once and then trusted.

A key that we do not know is an error, so that a typing mistake is seen and not silently ignored.  Keys without the
prefix belong to somebody else (MultiConnector passes its own) and are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "kvkeep."
LEARNED = "learned"  # min_hit is


@dataclass(frozen=True)
class Options:
    """What each field does is in docs/vllm.md; the defaults here are the ones that work."""

    run_dir: str = ""  # of the daemon; "" = $KVKEEP_RUN_DIR, or from $KVKEEP_NAME
    chunk_tokens: int = 0  # 0 = the daemon's default
    store_generated: bool = False
    min_hit: int | str = LEARNED  # tokens; smaller hits are computed
    lookup_deadline_ms: float = 100.0
    l2_wait_ms: float = 1000.0  # on top of it, when the daemon has L2
    transfer_deadline_s: float = 5.0  # of one load or one store, waiting in the queue included
    pinned_fraction: float = 0.25  # of the engine's KV blocks may be held for stores in flight
    load_threads: int = 2
    trust_new_adapters: bool = False  # files of LoRA adapters that are newer than the engine are never changed in place
    max_pin_s: float = 0.0  # how long requests may keep their prompts in L1


class OptionError(ValueError):
    """One sentence: key, value, what is allowed."""


_RANGES: dict[str, tuple[float, float]] = {
    "chunk_tokens": (0, 1 << 20),
    "lookup_deadline_ms": (0, 60_000),
    "l2_wait_ms": (0, 60_000),
    "transfer_deadline_s": (0.001, 3600),
    "pinned_fraction": (0, 1),
    "load_threads": (1, 64),
    "min_hit": (0, 1 << 30),
    "max_pin_s": (0, 366 * 86400),
}


def parse(extra: Mapping[str, object]) -> Options:
    """Raises OptionError."""
    known = Options.__dataclass_fields__
    values: dict[str, object] = {}
    for key, value in extra.items():
        if not key.startswith(PREFIX):
            continue
        field = key[len(PREFIX) :]
        if field not in known:
            names = ", ".join(PREFIX + name for name in known)
            raise OptionError(f"unknown option {key!r} in kv_connector_extra_config: the options are {names}")
        values[field] = _checked(key, field, value, type(known[field].default))
    return Options(**values)  # type: ignore[arg-type]


def _checked(key: str, field: str, value: object, wanted: type) -> object:
    if field == "min_hit":
        if value == LEARNED:
            return value
        if type(value) is not int:
            raise OptionError(f"{key} is {value!r}: it must be {LEARNED!r} or a number of tokens")
        wanted = int
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted:
        raise OptionError(f"{key} is {value!r}: it must be of type {wanted.__name__}")
    if field in _RANGES:
        low, high = _RANGES[field]
        if not low <= value <= high:  # type: ignore[operator]
            raise OptionError(f"{key} is {value!r}: it must be between {low} and {high}")
    return value
