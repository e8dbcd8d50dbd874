"""What `kvkeep` prints: statistics, namespaces and their differences as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvkeep.shm.hostcheck import Finding

_BAR = 30
_MISSING = object()


def status(document: Mapping[str, Any], run_dir: str, url: str) -> Iterator[str]:
    d = document
    l1 = d.get("l1", {})
    counters = d.get("counters", {})
    yield (
        f"kvkeepd {d.get('name', '')!r} {d.get('version', '')}: {d.get('health', '?')}   "
        f"pid {d.get('pid', '?')}, up {span(d.get('uptime_s', 0))}, epoch {d.get('epoch', '?')}, {run_dir}"
    )
    for reason in d.get("reasons", []):
        yield f"  ! {reason}"
    total, used, ready = (int(l1.get(key, 0)) for key in ("bytes_total", "bytes_used", "bytes_ready"))
    full = round(_BAR * used / total) if total else 0
    reserving = "" if ready >= total else f", {100 * ready // max(total, 1)} % of the memory reserved so far"
    yield f"L1       [{'#' * full}{'.' * (_BAR - full)}] {size(used)} of {size(total)}{reserving}"
    yield (
        f"         {l1.get('entries', 0)} chunks of at most {l1.get('entries_capacity', '?')}, "
        f"{l1.get('references', 0)} references, {size(l1.get('reserved_bytes', 0))} being written"
    )
    asked, hit = counters.get("lookup_chunks", 0), counters.get("lookup_chunks_hit", 0)
    rate = f"{100 * hit / asked:.1f} % of {asked} chunks asked for" if asked else "nothing asked yet"
    yield f"hits     {rate}"
    yield (
        f"traffic  {size(counters.get('commit_bytes', 0))} stored, {size(counters.get('retrieve_bytes', 0))} loaded, "
        f"{counters.get('entries_evicted', 0)} chunks evicted, {counters.get('stores_refused_full', 0)} refused (full)"
    )
    if url:
        yield f"web      {url}"
    adapters = d.get("l2", [])
    if adapters:
        yield ""
        yield f"{len(adapters)} L2 adapters"
        columns = (
            "name",
            "type",
            "state",
            "used",
            "limit",
            "objects",
            "stored",
            "loaded",
            "queued",
            "shed",
            "failures",
        )
        yield from table(columns, [_adapter(row) for row in adapters])
    clients = d.get("clients", [])
    yield ""
    yield f"{d.get('clients_total', len(clients))} clients"
    yield from table(
        ("name", "pid", "uid", "references", "writing", "idle"),
        [
            (
                c.get("name") or "-",
                c.get("pid", "?"),
                c.get("uid", "?"),
                c.get("references", 0),
                size(c.get("reserved_bytes", 0)),
                span(c.get("idle_s", 0)),
            )
            for c in clients
        ],
    )
    spaces = d.get("namespaces", [])
    yield f"{len(spaces)} namespaces"
    yield from table(("id", "digest", "chunks", "bytes", "shards"), [_row(n) for n in spaces])


def _adapter(a: Mapping[str, Any]) -> tuple[object, ...]:
    state = a.get("phase", "?") if a.get("breaker") == "closed" else f"left alone ({a.get('breaker', '?')})"
    failures = ", ".join(f"{count} {what}" for what, count in a.get("failures", {}).items()) or "-"
    return (
        a.get("name", "?"),
        a.get("label", a.get("type", "?")),
        state,
        size(a.get("bytes_used", 0)),
        size(a.get("bytes_limit", 0)),
        a.get("objects", 0),
        size(a.get("bytes_stored", 0)),
        size(a.get("bytes_loaded", 0)),
        size(a.get("bytes_queued", 0)),
        a.get("stores_shed", 0),
        failures,
    )


def _row(n: Mapping[str, Any]) -> tuple[object, ...]:
    shards = f"{n.get('shards', '?')} x {size(n.get('shard_bytes', 0))}"
    return n.get("id", "?"), str(n.get("digest", ""))[:12], n.get("entries", 0), size(n.get("bytes", 0)), shards


def namespace(n: Mapping[str, Any]) -> Iterator[str]:
    number, digest, chunks, held, shards = _row(n)
    yield f"namespace {number}  {digest}  {chunks} chunks, {held}, {shards} per chunk"
    for key, value in flatten(n.get("manifest", {})).items():
        yield f"    {plain(key)} = {short(value)}"


def entries(page: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for e in page:
        held = f"  {e['references']} references" if e.get("references") else ""
        yield f"  {str(e.get('key', ''))[:32]}  {e.get('state', '?'):<8}  {size(e.get('bytes', 0)):>10}{held}"


def dropped(count: int, in_use: int, l2: Sequence[Mapping[str, Any]], problem: str) -> Iterator[str]:
    """What a clear did."""
    yield f"{count} chunks dropped" + (f", {in_use} are in use and stay in L1" if in_use else "")
    for one in l2:
        where = f"{one['name']} ({plain(str(one['label']))})"
        if one["state"] == "removed":
            yield f"{where}: {one['removed']} objects removed"
        elif one["state"] == "under way":
            yield f"{where}: {one['removed']} objects removed so far, it goes on; nothing of it is served"
        else:
            yield f"{where}: not yet removed ({plain(str(one['why'] or 'it is away'))}); this is remembered, and"
            yield "    nothing of it is served meanwhile"
    if problem:
        yield f"! {plain(problem)}"


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Which fields make two namespaces two."""
    left, right = flatten(a.get("manifest", {})), flatten(b.get("manifest", {}))
    for field in ("shards", "shard_bytes"):
        left[f"({field})"], right[f"({field})"] = a.get(field), b.get(field)
    names = [n for n in dict.fromkeys([*left, *right]) if left.get(n, _MISSING) != right.get(n, _MISSING)]
    if not names:
        yield "the manifests are the same"
    for name in names:
        yield plain(name)
        for which, side in ((a, left), (b, right)):
            value = short(side[name]) if name in side else "(absent)"
            yield f"    {which.get('id', '?')}: {value}"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested manifest -> dotted names.  Empty containers stay as values, so that empty and absent differ."""
    inside: Sequence[tuple[Any, Any]]
    if isinstance(value, Mapping) and value:
        inside = list(value.items())
    elif isinstance(value, list) and value and any(isinstance(item, (Mapping, list)) for item in value):
        inside = list(enumerate(value))
    else:
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for key, item in inside:
        found.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return found


def findings(found: Sequence[Finding], color: bool) -> Iterator[str]:
    paint = {"ok": "32", "warn": "33", "error": "31"}
    for level, check, message in found:
        word = f"\033[{paint.get(level, '0')}m{level:<5}\033[0m" if color else f"{level:<5}"
        yield f"{word} {check:<10} {message}"


def plain(line: str) -> str:
    """Names and manifests are the clients': what would steer a terminal is shown instead."""
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    if not rows:
        return
    text = [[plain(str(cell)) for cell in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(columns))]
    for row in text:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def size(count: Any) -> str:
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.1f} {units[0]}"


def span(seconds: Any) -> str:
    whole = int(seconds)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= length:
            return f"{whole // length} {unit}"
    return f"{whole} s"


def short(value: Any, limit: int = 96) -> str:
    text = value if isinstance(value, str) else repr(value)
    return plain(text if len(text) <= limit else text[: limit - 1] + "…")
