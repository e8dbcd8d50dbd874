"""The ``storage_plugin.<name>.*`` keys of LMCache's extra_config that are ours, and what a store of chunks is named by.

LMCache does not tell a plugin its ``<name>``: it is the one of ``storage_plugins`` whose module_path and class_name are
the plugin's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from kvkeep.ipc import extra_config

SPACE = "lmcache"
MAX_PAGE_BYTES = 64 << 20  # a chunk is one page up to here: found and read in the fewest round trips


@dataclass(frozen=True)
class Options:
    """What each field does is in docs/lmcache-plugin.md; the defaults here are the ones that work."""

    run_dir: str = ""  # of the daemon; "" = $KVKEEP_RUN_DIR, or from $KVKEEP_NAME
    identity: str = ""  # what the bytes depend on and LMCache's keys do not say: a revision of the weights, say
    lookup_deadline_ms: float = 1000.0
    l2_wait_ms: float = 1000.0  # on top of it, when the daemon has L2
    transfer_deadline_s: float = 5.0  # of one batch of loads or stores; a copy that has begun is finished
    pin_ttl_s: float = 300.0  # a pin that LMCache forgets ends by itself
    copy_threads: int = 2


_RANGES: dict[str, tuple[float, float]] = {
    "lookup_deadline_ms": (1, 60_000),
    "l2_wait_ms": (0, 60_000),
    "transfer_deadline_s": (0.001, 3600),
    "pin_ttl_s": (1, 86_400),
    "copy_threads": (1, 64),
}
_LMCACHES = ("module_path", "class_name")


def parse(plugins: Iterable[str] | None, extra: Mapping[str, object] | None, module: str, name: str) -> Options:
    """Of the plugin whose class is ``module``.``name``.  Raises ValueError: one sentence with key, value and what is
    allowed."""
    extra = extra or {}
    ours = [
        plugin
        for plugin in sorted(set(plugins or ()))
        if (extra.get(f"storage_plugin.{plugin}.module_path"), extra.get(f"storage_plugin.{plugin}.class_name"))
        == (module, name)
    ]
    if len(ours) > 1:
        raise ValueError(f"the storage plugins {', '.join(ours)} are all {name}: one is enough, remove the others")
    defaults = {field.name: field.default for field in fields(Options)}
    if not ours:  # made by hand
        return Options()
    prefix = f"storage_plugin.{ours[0]}."
    mine = {key: value for key, value in extra.items() if str(key) not in {prefix + one for one in _LMCACHES}}
    return Options(**extra_config.parse(defaults, _RANGES, mine, "LMCache's extra_config", prefix=prefix))


def page_bytes_of(chunk_bytes: int) -> int:
    """Payload of a page, for chunks of so many bytes: the whole chunk, or equal parts of it."""
    pieces = -(-chunk_bytes // MAX_PAGE_BYTES)
    return max(1, -(-chunk_bytes // max(1, pieces)))
