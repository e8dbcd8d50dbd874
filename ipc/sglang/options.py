"""The ``kvkeep.*`` keys of SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvkeep.ipc import extra_config


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
    defaults = {field.name: field.default for field in fields(Options)}
    return Options(**extra_config.parse(defaults, _RANGES, extra or {}, "the storage backend's extra config"))
