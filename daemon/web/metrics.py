"""The statistics document as Prometheus text.

Every series exists at zero before the first traffic, so that a dashboard or an alert does not have to guess.  What the
document has beyond this table is exported too, under a name made from its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvkeep.daemon.web.source import age_s, problems

# Counter of the daemon -> what it counts.
COUNTERS = {
    "attaches": "Clients that attached",
    "attach_refused": "Clients that were refused at attach",
    "detaches": "Clients whose connection ended",
    "requests": "Requests answered, errors included",
    "malformed": "Messages that were no request",
    "rpc_connections_cut": "RPC connections ended because requests without an end or unread replies filled the memory",
    "lookups": "LOOKUP requests",
    "lookup_chunks": "Chunks asked for in LOOKUP requests",
    "lookup_chunks_hit": "Chunks found in LOOKUP requests",
    "retrieves": "RETRIEVE requests",
    "retrieve_chunks": "Chunks whose extents were handed out for reading",
    "retrieve_bytes": "Bytes handed out for reading",
    "stores": "STORE requests",
    "store_chunks": "Chunks granted in STORE requests",
    "commits": "COMMIT requests",
    "commit_bytes": "Bytes committed",
    "stores_refused_full": "Chunks refused because no memory was free or evictable",
    "entries_evicted": "Chunks evicted",
    "bytes_evicted": "Bytes evicted",
    "entries_deleted": "Chunks deleted on request",
    "entries_given_up": "Chunks lost because a head that they hang on was given up",
    "entries_incomplete": "Chunks dropped because one of their writers ended before all shards were in",
    "entries_passed": "Chunks that left L1 with their last reader, because L2 has them",
    "l2_chunks_stored": "Chunks stored in L2, over all adapters",
    "l2_store_failures": "Chunks that an adapter could not store",
    "l2_stores_shed": "Chunks whose store was put off because the queue was full",
    "l2_stores_too_late": "Chunks that left L1 before their store to L2 began",
    "l2_stores_not_wanted": "Chunks that the store policy did not give to an adapter",
    "l2_chunks_loaded": "Chunks loaded from L2",
    "l2_load_failures": "Chunks that L2 had and that could not be loaded",
    "l2_loads_refused_full": "Chunks not loaded because no memory was free or evictable",
    "l2_prefetches": "Chains looked for in L2",
    "l2_prefetches_expired": "Chains not found out about in L2 by their deadline",
    "refused_bad_request": "Requests refused: malformed",
    "refused_unknown_op": "Requests refused: unknown operation",
    "refused_unknown_lease": "Requests refused: not attached",
    "refused_stale_epoch": "Requests refused: sent to an earlier daemon",
    "refused_unknown_namespace": "Requests refused: unknown namespace",
    "refused_unknown_handle": "Requests refused: unknown handle",
    "refused_too_large": "Requests refused: too large",
    "refused_denied": "Requests refused: the user may not do this",
    "refused_limit": "Requests refused: a table is full",
    "refused_internal": "Requests that met a bug",
}

# Key under "l1" -> (metric, help).
_L1 = {
    "bytes_total": ("l1_capacity_bytes", "Size of the arena"),
    "bytes_ready": ("l1_ready_bytes", "Bytes of the arena whose memory is reserved already"),
    "bytes_used": ("l1_used_bytes", "Bytes in use"),
    "reserved_bytes": ("l1_reserved_bytes", "Bytes that are being written"),
    "bytes_quarantined": ("l1_quarantined_bytes", "Bytes kept aside because a client of before may still use them"),
    "bytes_evictable": ("l1_evictable_bytes", "Bytes that could be evicted now"),
    "entries": ("l1_entries", "Chunks held"),
    "entries_capacity": ("l1_entries_capacity", "Chunks that can be held at once"),
    "references": ("l1_references", "References held by readers"),
    "lookups_waiting": ("l1_lookups_waiting", "Lookups that wait for chunks being written"),
}

# Key of a row under "l2" -> (metric, kind, help).
_L2 = {
    "bytes_used": ("l2_used_bytes", "gauge", "Bytes on the medium"),
    "bytes_limit": ("l2_capacity_bytes", "gauge", "Bytes that the medium may hold"),
    "objects": ("l2_objects", "gauge", "Objects on the medium"),
    "bytes_queued": ("l2_queued_bytes", "gauge", "Bytes of L1 that wait to be stored"),
    "bytes_storing": ("l2_storing_bytes", "gauge", "Bytes of L1 held by stores that run"),
    "bytes_loading": ("l2_loading_bytes", "gauge", "Bytes of L1 that loads are writing"),
    "jobs": ("l2_jobs", "gauge", "Jobs that the mover has"),
    "restarts": ("l2_restarts_total", "counter", "Times that the mover was started again"),
    "breaker_opened": ("l2_breaker_opened_total", "counter", "Times that the medium was left alone after failures"),
    "bytes_stored": ("l2_stored_bytes_total", "counter", "Bytes stored"),
    "chunks_stored": ("l2_stored_chunks_total", "counter", "Chunks stored"),
    "bytes_loaded": ("l2_loaded_bytes_total", "counter", "Bytes loaded"),
    "chunks_loaded": ("l2_loaded_chunks_total", "counter", "Chunks loaded"),
    "stores_shed": (
        "l2_stores_shed_chunks_total",
        "counter",
        "Chunks whose store was put off because the queue was full",
    ),
    "removals_pending": ("l2_removals_pending", "gauge", "Clears and deletes that are still to be done"),
    "objects_removed": ("l2_removed_objects_total", "counter", "Objects removed by clears and deletes"),
    "jobs_late": ("l2_late_jobs_total", "counter", "Jobs that had no answer by their deadline"),
}

_NAME = re.compile(r"[^a-zA-Z0-9_]")


def render(document: Mapping[str, Any]) -> str:
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    d = dict(document)
    yield from _metric(
        "info", "gauge", "Name and version", [({"name": d.get("name", ""), "version": d.get("version", "")}, 1)]
    )
    yield from _metric("healthy", "gauge", "1 when /readyz says yes", [({}, int(not problems(d)))])
    yield from _metric("epoch", "gauge", "Grows at each start of the daemon", [({}, _number(d.get("epoch")))])
    yield from _metric("uptime_seconds", "gauge", "Since the daemon started", [({}, _number(d.get("uptime_s")))])
    yield from _metric("stats_age_seconds", "gauge", "Since control wrote its statistics", [({}, age_s(d))])

    l1 = _mapping(d.get("l1"))
    for key in dict.fromkeys([*_L1, *l1]):
        name, text = _L1.get(key, (f"l1_{key}", f"The daemon's l1.{key}"))
        if key in _L1 or isinstance(l1.get(key), (int, float)):
            yield from _metric(name, "gauge", text, [({}, _number(l1.get(key)))])

    yield from _metric("clients", "gauge", "Clients attached", [({}, _clients(d))])
    namespaces = [(_labels(n), n) for n in _items(d.get("namespaces"))]
    yield from _metric("namespaces", "gauge", "Namespaces registered", [({}, len(namespaces))])
    for key in ("entries", "bytes"):
        samples = [(labels, _number(n.get(key))) for labels, n in namespaces]
        yield from _metric(f"namespace_{key}", "gauge", f"{key.capitalize()} held per namespace", samples)

    adapters = [({"adapter": str(a.get("name", "")), "type": str(a.get("type", ""))}, a) for a in _items(d.get("l2"))]
    for key, (name, kind, text) in _L2.items():
        yield from _metric(name, kind, text, [(labels, _number(a.get(key))) for labels, a in adapters])
    up = [(labels, float(a.get("phase") == "serving" and a.get("breaker") == "closed")) for labels, a in adapters]
    yield from _metric("l2_available", "gauge", "1 when the adapter is given jobs", up)
    failed = [
        (labels | {"reason": str(reason)}, _number(count))
        for labels, a in adapters
        for reason, count in _mapping(a.get("failures")).items()
    ]
    yield from _metric("l2_failures_total", "counter", "Chunks that could not be stored or loaded", failed)

    counters = _mapping(d.get("counters"))
    for key in dict.fromkeys([*COUNTERS, *sorted(counters)]):
        text = COUNTERS.get(key, f"The daemon's counter {key}")
        yield from _metric(f"{key}_total", "counter", text, [({}, _number(counters.get(key)))])


def _metric(name: str, kind: str, text: str, samples: list[tuple[dict[str, str], float]]) -> Iterator[str]:
    name = "kvkeep_" + _NAME.sub("_", name)
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
        yield f"{name}{{{inside}}} {value:.17g}" if inside else f"{name} {value:.17g}"


def _labels(namespace: Mapping[str, Any]) -> dict[str, str]:
    return {
        "namespace": str(namespace.get("id", "")),
        "digest": str(namespace.get("digest", ""))[:16],
        "model": str(namespace.get("model") or ""),
    }


def _clients(document: Mapping[str, Any]) -> float:
    """The list may be cut; the total is not."""
    total = document.get("clients_total")
    return _number(total) if total is not None else len(_items(document.get("clients")))


def _escape(label: str) -> str:
    return str(label).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
