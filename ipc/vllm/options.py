"""The ``kvkeep.*`` keys of vLLM's kv_connector_extra_config.  (MultiConnector passes others of its own there.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvkeep.ipc.extra_config import PREFIX, OptionError
from kvkeep.ipc.extra_config import parse as parse_keys

MIN_HIT, LEARNED = PREFIX + "min_hit", "learned"
COMPLETE, LEAVING = "complete", "leaving"  # when a chunk is stored: at once, or when the engine is about to forget it


@dataclass(frozen=True)
class Options:
    """What each field does is in docs/vllm.md; the defaults here are the ones that work."""

    run_dir: str = ""  # of the daemon; "" = $KVKEEP_RUN_DIR, or from $KVKEEP_NAME
    chunk_tokens: int = 0  # 0 = the daemon's default
    store_generated: bool = False
    store_when: str = COMPLETE  # or LEAVING
    min_hit: int | str = LEARNED  # tokens; smaller hits are computed
    lookup_deadline_ms: float = 100.0
    l2_wait_ms: float = 1000.0  # on top of it, when the daemon has L2
    transfer_deadline_s: float = 5.0  # of one load or one store, waiting in the queue included
    pinned_fraction: float = 0.25  # of the engine's KV blocks may be held for stores in flight
    load_threads: int = 2
    trust_new_adapters: bool = False  # files of LoRA adapters that are newer than the engine are never changed in place
    max_pin_s: float = 0.0  # how long requests may keep their prompts in L1


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
    defaults = {field.name: field.default for field in fields(Options)}
    min_hit = extra.get(MIN_HIT, LEARNED)
    if min_hit == LEARNED:
        extra = {key: value for key, value in extra.items() if key != MIN_HIT}
    elif type(min_hit) is int:
        defaults["min_hit"] = 0
    else:
        raise OptionError(f"{MIN_HIT} is {min_hit!r}: it must be {LEARNED!r} or a number of tokens")
    options = Options(**parse_keys(defaults, _RANGES, extra, "kv_connector_extra_config"))
    if options.store_when not in (COMPLETE, LEAVING):
        raise OptionError(f"{PREFIX}store_when is {options.store_when!r}: it must be {COMPLETE!r} or {LEAVING!r}")
    return options
