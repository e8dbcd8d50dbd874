"""What the connector counts, and how vLLM logs and exports it.

    lookups.py, stores.py ──add, seen, level──▶ Tally ──take, each step──▶ KVKeepStats ──vLLM──▶ its logger    (reduce)
                                                                                         └─────▶ Prometheus (KVKeepProm)

Everything is counted by the scheduler half, on the engine's thread: each event is seen there once, whatever the number
of ranks, so nothing has to be merged over ranks and no lock is needed.  A step in which nothing happened makes no
object.  `SERIES` is the only list of what exists; a key that is not in it is counted and not exported.

A payload is three plain dicts, as vLLM sends it between processes::

    {"add": {key: number}, "set": {key: number}, "seen": {key: [seconds, ...]}}

with key = series name, or series name + "_" + label value.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import LoadFailure, StoreEnd

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvkeep")

PREFIX = "vllm:kvkeep_"
KEEP = 4096  # observations of one series in one payload: the logger adds up payloads for as long as nobody asks it
SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Tier(enum.Enum):
    """Where a hit was found."""

    L1 = "l1"  # there when the daemon was asked
    L2 = "l2"  # came while the lookup waited: from L2, or because another engine had just written it


class LookupEnd(enum.Enum):
    HIT = "hit"  # a chunk or more is there
    MISS = "miss"
    EXPIRED = "expired"  # no answer within the deadline
    DROPPED = "dropped"  # nobody wanted the answer any more


class Skipped(enum.Enum):
    """Why a complete chunk was not stored."""

    PINS = "pins"  # stores in flight hold too many blocks already
    WINDOW = "window"  # the engine has let go of blocks that a hit would need


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    name: str  # exported as PREFIX + name, a counter with _total behind it
    kind: Kind
    text: str
    label: str = ""
    values: type[enum.Enum] | None = None

    def parts(self) -> dict[str, list[str]]:
        """Payload key -> values of our own label."""
        if self.values is None:
            return {self.name: []}
        return {f"{self.name}_{member.value}": [member.value] for member in self.values}


SERIES = (
    Series("lookups", Kind.COUNTER, "Lookups by how they ended.", "result", LookupEnd),
    Series("lookup_seconds", Kind.HISTOGRAM, "How long a request waited for the answer to its lookup."),
    Series("hit_tokens", Kind.COUNTER, "Prompt tokens that vLLM admitted as a hit.", "tier", Tier),
    Series("hit_bytes", Kind.COUNTER, "KV bytes of these tokens, all ranks.", "tier", Tier),
    Series("hits_declined", Kind.COUNTER, "Hits that take longer to load than to compute: they were computed."),
    Series("loads_waited_for", Kind.COUNTER, "Requests that waited for what another request was loading."),
    Series("loads", Kind.COUNTER, "Loads that ended well."),
    Series("loaded_tokens", Kind.COUNTER, "Tokens whose KV was loaded."),
    Series("loaded_bytes", Kind.COUNTER, "KV bytes that were loaded, all ranks."),
    Series("load_seconds", Kind.HISTOGRAM, "From a load's admission to the step that reports it, failed or not."),
    Series("load_failures", Kind.COUNTER, "Loads that failed; their tokens are computed.", "reason", LoadFailure),
    Series("failed_tokens", Kind.COUNTER, "Tokens of a hit that were not loaded."),
    Series("failed_bytes", Kind.COUNTER, "KV bytes of these tokens, all ranks."),
    Series("stores", Kind.COUNTER, "Store jobs by how they ended.", "end", StoreEnd),
    Series("stored_tokens", Kind.COUNTER, "Tokens whose KV this engine stored."),
    Series("stored_bytes", Kind.COUNTER, "KV bytes that this engine stored, all ranks."),
    Series("store_seconds", Kind.HISTOGRAM, "How long a store job held its blocks, failed or not."),
    Series("chunks_skipped", Kind.COUNTER, "Complete chunks that were not stored.", "reason", Skipped),
    Series("pinned_blocks", Kind.GAUGE, "KV blocks that stores in flight hold."),
    Series("attached", Kind.GAUGE, "1 = attached to the daemon and serving; 0 = every lookup is a miss."),
)

GPU_SERIES = (
    Series("arena_bytes", Kind.GAUGE, "The daemon's arena, added up over the ranks, each of which maps it."),
    Series("arena_pinned_bytes", Kind.GAUGE, "What of it is pinned: the GPU copies straight to and from it."),
)


BY_NAME = {series.name: series for series in (*SERIES, *GPU_SERIES)}
_KEYS = frozenset(key for series in BY_NAME.values() for key in series.parts())


def series_of(vllm_config: VllmConfig) -> tuple[Series, ...]:
    """What an engine exports."""
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "")
    return (*SERIES, *GPU_SERIES) if device == "cuda" else SERIES


@dataclass
class KVKeepStats(KVConnectorStats):  # type: ignore[misc]
    """One interval, or several added up."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, data: dict[str, Any]) -> KVKeepStats:
        """A copy: several of vLLM's loggers are handed the same payload, and one of them adds up."""
        stats = cls()
        return stats._merge(data)

    def reset(self) -> None:
        self.data: dict[str, dict[str, Any]] = {"add": {}, "set": {}, "seen": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVKeepStats:
        return self._merge(other.data)

    def _merge(self, data: dict[str, Any]) -> KVKeepStats:
        sums, seen = self.data["add"], self.data["seen"]
        for key, amount in data["add"].items():
            sums[key] = sums.get(key, 0) + amount
        self.data["set"].update(data["set"])
        for key, values in data["seen"].items():
            mine = seen.setdefault(key, [])
            mine.extend(values[: KEEP - len(mine)])
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows: traffic always, trouble only when there is some."""
        add, level, seen = Counter(self.data["add"]), self.data["set"], self.data["seen"]

        def total(name: str) -> int:
            return int(sum(add[key] for key in BY_NAME[name].parts()))

        line: dict[str, int | float] = {
            "kvkeep lookups": total("lookups"),
            "hit tokens": total("hit_tokens"),
            "loaded tokens": total("loaded_tokens"),
            "loaded MB": round(add["loaded_bytes"] / 1e6, 1),
            "avg load ms": _mean_ms(seen.get("load_seconds", [])),
            "stored tokens": total("stored_tokens"),
            "stored MB": round(add["stored_bytes"] / 1e6, 1),
            "avg store ms": _mean_ms(seen.get("store_seconds", [])),
        }
        trouble = {
            "expired lookups": add["lookups_expired"],
            "failed loads": total("load_failures"),
            "failed stores": add["stores_failed"],
            "stores into a full cache": add["stores_full"],
            "skipped chunks": total("chunks_skipped"),
        }
        line |= {name: int(count) for name, count in trouble.items() if count}
        return line | {name: level[name] for name in ("attached", "pinned_blocks") if name in level}


def _mean_ms(seconds: list[float]) -> float:
    return round(1000 * sum(seconds) / len(seconds), 2) if seconds else 0.0


class Tally:
    """Counts of the scheduler half.  One thread, the engine's; nothing here can fail."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()  # since the start
        self._levels: dict[str, int] = {}
        self._fresh: KVKeepStats | None = None  # since the last `take`

    def add(self, key: str, amount: int = 1) -> None:
        if amount:
            self.totals[key] += amount
            if key in _KEYS:
                sums = self._interval().data["add"]
                sums[key] = sums.get(key, 0) + amount

    def seen(self, key: str, seconds: float) -> None:
        observed = self._interval().data["seen"].setdefault(key, [])
        if len(observed) < KEEP:
            observed.append(seconds)

    def level(self, key: str, value: int) -> None:
        """Costs nothing while it stays the same."""
        if self._levels.get(key) != value:
            self._levels[key] = self._interval().data["set"][key] = value

    def take(self) -> KVKeepStats | None:
        """None = nothing has happened since the last call."""
        stats, self._fresh = self._fresh, None
        return stats

    def _interval(self) -> KVKeepStats:
        if self._fresh is None:
            self._fresh = KVKeepStats()
        return self._fresh


class KVKeepProm(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers all series for each engine of the process, so that every series is there, at zero, from the start.

    `metric_types` are Prometheus' classes, or Ray's with the same interface.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._guard = Guard(logger.warning)
        self._children: dict[tuple[int, str], Any] = {}
        for series in series_of(vllm_config):
            family = self._family(series, labelnames + ([series.label] if series.label else []))
            for engine, labels in per_engine_labelvalues.items():
                for key, own in series.parts().items():
                    self._children[engine, key] = family.labels(*labels, *own)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """What raises here ends vLLM's frontend with all its requests."""
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception as error:
            self._guard.note("observe", error)

    def _observe(self, transfer_stats_data: dict[str, Any], engine_idx: int) -> None:
        def known(part: str) -> list[tuple[Any, Any]]:
            found = [(self._children.get((engine_idx, key)), value) for key, value in transfer_stats_data[part].items()]
            return [(child, value) for child, value in found if child is not None]

        for child, amount in known("add"):
            child.inc(amount)
        for child, value in known("set"):
            child.set(value)
        for child, values in known("seen"):
            for value in values:
                child.observe(value)

    def _family(self, series: Series, labels: list[str]) -> Any:
        name = PREFIX + series.name
        if series.kind is Kind.COUNTER:
            return self._counter_cls(name=name, documentation=series.text, labelnames=labels)
        if series.kind is Kind.GAUGE:
            return self._gauge_cls(
                name=name, documentation=series.text, labelnames=labels, multiprocess_mode="mostrecent"
            )
        return self._histogram_cls(name=name, documentation=series.text, labelnames=labels, buckets=list(SECONDS))
