"""`kvkeep l2`: looks into L2, checks it and tidies it, through the daemon or, without one, by itself.

    kvkeep l2 ls|stat|verify|compact [ADAPTER] [--namespace N]                      asks the daemon, step by step
    kvkeep l2 --adapter '{"type": "fs", "base_path": "/nvme/kv"}' ls|stat|…         opens the medium itself

A medium that a daemon uses is refused, unless its adapter can share it.  What is opened here is not evicted from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from kvkeep.daemon import cli_show as show
from kvkeep.shm.namespaces import tenant_of

PAGE = 1000
_BAR = 30
_BAR_AFTER_S = 1.0
_EXISTING = ("base_path", "path")  # what an adapter would make if it is not there


class Problem(Exception):
    """One sentence for the user; ``usage`` = it is the command line that is wrong."""

    def __init__(self, text: str, *, usage: bool = False) -> None:
        super().__init__(text)
        self.usage = usage


class Source(Protocol):
    """Where the answers come from."""

    def rows(self) -> list[dict[str, Any]]:
        """Per adapter: name, label, type, bytes_used, bytes_limit, objects, adapter (its counters), …"""

    def step(self, name: str, what: str, namespace: bytes, cursor: str, limit: int) -> dict[str, Any]:
        """See l2_manage.document."""

    def namespaces(self) -> list[dict[str, Any]]:
        """Those with a manifest that are known here: id, digest, manifest."""


class Direct:
    """The medium, opened by this process."""

    def __init__(self, text: str) -> None:
        from kvkeep.l2.adapter import AdapterError
        from kvkeep.l2.maintenance import Maintenance
        from kvkeep.l2.registry import create_adapter

        config = _config(text)
        try:
            self._adapter = create_adapter(config)
        except AdapterError as problem:
            raise Problem(str(problem), usage=True) from None
        try:
            self._adapter.open()
        except AdapterError as problem:
            raise Problem(str(problem)) from None
        self._maintenance = Maintenance(self._adapter)
        self._label = str(config.get("name") or config["type"])

    def close(self) -> None:
        self._adapter.close()

    def rows(self) -> list[dict[str, Any]]:
        used, limit, objects = self._adapter.usage()
        about = {"name": "l2-0", "label": self._label, "type": self._adapter.type_name}
        return [
            about
            | {"bytes_used": used, "bytes_limit": limit, "objects": objects}
            | {"adapter": dict(self._adapter.counters)}
        ]

    def step(self, name: str, what: str, namespace: bytes, cursor: str, limit: int) -> dict[str, Any]:
        from kvkeep.daemon.l2_manage import document

        return document(self._maintenance.step(what, namespace, bytes.fromhex(cursor), limit))

    def namespaces(self) -> list[dict[str, Any]]:
        return []


def _config(text: str) -> dict[str, Any]:
    from kvkeep.l2.options import parse_json

    try:
        config = parse_json(text)
    except ValueError as problem:
        raise Problem(f"--adapter {text!r} is not JSON: {problem}", usage=True) from None
    if not isinstance(config, dict):
        raise Problem(f'--adapter {text!r} is not an object like {{"type": "fs", …}}', usage=True)
    for key in _EXISTING:
        paths = config.get(key, [])
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str) and not os.path.exists(path):
                raise Problem(f"--adapter: {path} is not there: give the {key} that the daemon has", usage=True)
    config.pop("threads", None)
    if config.get("type") in ("fs", "raw_block"):
        config["eviction"] = {"eviction_policy": "noop"}  # whatever capacity is given here: nothing goes
    return config


def add_parser(sub: argparse.ArgumentParser, where: argparse.ArgumentParser) -> None:
    sub.add_argument("--adapter", metavar="JSON", help="open this medium here, without a daemon")
    actions = sub.add_subparsers(dest="l2", required=True, metavar="ls|stat|verify|compact")
    texts = {
        "ls": "the objects: namespace, chunk, shard, bytes at rest, serdes",
        "stat": "usage, counters, and bytes by namespace and by tenant",
        "verify": "read and check every object; what is corrupt is removed, and is exit status 1",
        "compact": "give back what the medium can",
    }
    for name, text in texts.items():
        action = actions.add_parser(name, parents=[where], help=text, description=text, allow_abbrev=False)
        action.add_argument("which", nargs="?", metavar="ADAPTER", help="its name or label (default: all)")
        if name == "ls":
            action.add_argument("--namespace", help="only of this one: its id, or the beginning of its digest")
            action.add_argument("--limit", type=int, default=PAGE, help=f"objects at most (default: {PAGE})")


def run(source: Source, args: argparse.Namespace, as_json: bool) -> int:
    """Returns the exit status."""
    rows = source.rows()
    chosen = [row for row in rows if args.which in (None, row["name"], row["label"])]
    if not chosen:
        if not rows:
            raise Problem("this daemon has no L2: start it with --l2-adapter to have one", usage=True)
        names = ", ".join(f"{row['name']} ({row['label']})" for row in rows)
        raise Problem(f"there is no L2 adapter {args.which!r}; there are {names}", usage=True)
    command = {"ls": _ls, "stat": _stat, "verify": _verify, "compact": _compact}[args.l2]
    return command(source, chosen, args, as_json)


# ---- commands ------------------------------------------------------------------------------------------------------


def _ls(source: Source, rows: list[dict[str, Any]], args: argparse.Namespace, as_json: bool) -> int:
    known = source.namespaces()
    only = _digest(source, rows, known, args.namespace) if args.namespace else b""
    left, found = max(0, args.limit), []
    for row in rows:
        objects: list[dict[str, Any]] = []
        more = False
        for step in _steps(source, row, "list", only):
            objects += step["rows"][: left - len(objects)]
            more = bool(step["cursor"]) or len(step["rows"]) > left
            if len(objects) >= left:
                break
        left -= len(objects)
        found.append({"name": row["name"], "label": row["label"], "objects": objects, "more": more})
    for one in (one for part in found for one in part["objects"]):
        one["serdes"] = [_serde(number) for number in one["serdes"]]
    spaces = {one["namespace"]: part["name"] for part in found for one in part["objects"]}
    manifests = _manifests(source, known, spaces)
    if as_json:
        print(json.dumps({"adapters": found, "manifests": manifests}))
        return 0
    for digest in sorted(spaces):
        print(f"namespace {digest[:12]}  {_readable(manifests.get(digest))}")
    for part in found:
        print(f"{part['name']} ({show.plain(part['label'])})")
        columns = ("namespace", "chunk", "shard", "bytes", "serdes")
        cells = [
            (o["namespace"][:12], o["chunk"][:16], f"{o['shard']}/{o['shards']}", o["bytes"], "+".join(o["serdes"]))
            for o in part["objects"]
        ]
        for line in show.table(columns, cells):
            print(line)
        if part["more"]:
            print(f"  … and more: --limit {2 * args.limit} shows them, --namespace fewer")
    return 0


def _stat(source: Source, rows: list[dict[str, Any]], args: argparse.Namespace, as_json: bool) -> int:
    known = source.namespaces()
    found = []
    for row in rows:
        objects: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        unreadable = 0
        tenants: dict[str, Any] = {}
        for step in _steps(source, row, "tally", b"", label="counting"):
            unreadable, tenants = unreadable + step["unreadable"], step["tenants"] or tenants
            for digest, counted in step["namespaces"].items():
                objects[digest] += counted["objects"]
                nbytes[digest] += counted["bytes"]
        manifests = _manifests(source, known, dict.fromkeys(objects, row["name"]))
        spaces = [
            {"digest": digest, "objects": count, "bytes": nbytes[digest], "manifest": manifests.get(digest)}
            for digest, count in objects.most_common()
        ]
        tenants = tenants or _by_tenant(spaces)
        found.append({**row, "namespaces": spaces, "tenants": tenants, "unreadable": unreadable})
    if as_json:
        print(json.dumps({"adapters": found}))
        return 0
    for row in found:
        print(f"{row['name']} ({show.plain(row['label'])}, {row['type']})")
        print(f"  {show.size(row['bytes_used'])} of {show.size(row['bytes_limit'])} used, {row['objects']} objects")
        if "breaker" in row:
            print(
                f"  {row['phase']}, breaker {row['breaker']} (opened {row['breaker_opened']} times), "
                f"{row['restarts']} restarts, {row['removals_pending']} removals still to be done"
            )
        if row["unreadable"]:
            print(f"  {row['unreadable']} objects or folders could not be read")
        for space in row["namespaces"]:
            held = f"{space['objects']} objects, {show.size(space['bytes'])}"
            print(f"  namespace {space['digest'][:12]}  {held}  {_readable(space['manifest'])}")
        for name, use in sorted(row["tenants"].items()):
            quota = "" if use["quota"] is None else f" of a quota of {show.size(use['quota'])}"
            print(f"  tenant {show.plain(name) or '(none)'}  {show.size(use['bytes'])}{quota}")
        counters = {**row.get("failures", {}), **row.get("adapter", {})}
        for line in show.table(("counter", "value"), sorted(counters.items())):
            print(line)
    return 0


def _verify(source: Source, rows: list[dict[str, Any]], args: argparse.Namespace, as_json: bool) -> int:
    found = []
    for row in rows:
        total: Counter[str] = Counter()
        details: list[str] = []
        for step in _steps(source, row, "verify", b"", label="checking"):
            for name in ("objects", "bytes", "corrupt", "unreadable"):
                total[name] += step[name]
            details += step["details"]
        numbers = {name: total[name] for name in ("objects", "bytes", "corrupt", "unreadable")}
        found.append({"name": row["name"], "label": row["label"], **numbers, "details": details})
    if as_json:
        print(json.dumps({"adapters": found}))
    for one in [] if as_json else found:
        text = f"{one['name']} ({show.plain(one['label'])}): {one['objects']} objects read, {show.size(one['bytes'])}"
        text += f"; {one['corrupt']} were corrupt and are removed" if one["corrupt"] else "; all are good"
        print(text + (f"; {one['unreadable']} could not be read" if one["unreadable"] else ""))
        for detail in one["details"]:
            print(f"  {show.plain(detail)}")
    return int(any(one["corrupt"] or one["unreadable"] for one in found))


def _compact(source: Source, rows: list[dict[str, Any]], args: argparse.Namespace, as_json: bool) -> int:
    found = []
    for row in rows:
        did: Counter[str] = Counter()
        for step in _steps(source, row, "compact", b""):
            did.update(step["did"])
        found.append({"name": row["name"], "label": row["label"], "did": dict(+did)})
    if as_json:
        print(json.dumps({"adapters": found}))
        return 0
    for one in found:
        text = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in sorted(one["did"].items()))
        print(f"{one['name']} ({show.plain(one['label'])}): {text or 'there was nothing to do'}")
    return 0


# ---- helpers -------------------------------------------------------------------------------------------------------


def _steps(
    source: Source, row: dict[str, Any], what: str, namespace: bytes, label: str = ""
) -> Iterator[dict[str, Any]]:
    """One step after the other until the adapter says that was the last."""
    cursor, seen = "", 0
    bar = Bar(f"{label} {row['name']}", row["objects"]) if label else None
    try:
        while True:
            step = source.step(row["name"], what, namespace, cursor, 0)
            if problem := step.get("problem"):
                raise Problem(str(problem))
            seen += step["objects"]
            if bar is not None:
                bar.show(seen)
            yield step
            cursor = step["cursor"]
            if not cursor:
                return
    finally:
        if bar is not None:
            bar.close()


class Bar:
    """How far something is, on a terminal, if it takes longer than a second."""

    def __init__(
        self, label: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label, self._total, self._stream, self._clock = label, total, stream or sys.stderr, clock
        self._began = clock()
        self._shown = False

    def show(self, done: int) -> None:
        if not self._stream.isatty() or self._clock() < self._began + _BAR_AFTER_S:
            return
        part = min(1.0, done / self._total) if self._total else 0.0
        full = round(_BAR * part)
        self._stream.write(f"\r{self._label} [{'#' * full}{'.' * (_BAR - full)}] {done} of {self._total}\033[K")
        self._stream.flush()
        self._shown = True

    def close(self) -> None:
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()


def _digest(source: Source, rows: list[dict[str, Any]], known: list[dict[str, Any]], word: str) -> bytes:
    """Of a namespace that the daemon knows, or else that is in L2."""
    found = [one["digest"] for one in known if str(one["id"]) == word or _begins(one["digest"], word)]
    if not found and all(letter in "0123456789abcdef" for letter in word.lower()):
        steps = (step for row in rows for step in _steps(source, row, "tally", b"", label="looking into"))
        found = sorted({digest for step in steps for digest in step["namespaces"] if _begins(digest, word)})
    if len(found) == 1:
        return bytes.fromhex(found[0])
    what = f"several namespaces begin with {word!r}" if found else f"there is no namespace {word!r}"
    raise Problem(f"{what}: `kvkeep l2 stat` lists those in L2", usage=True)


def _manifests(source: Source, known: list[dict[str, Any]], spaces: dict[str, str]) -> dict[str, Any]:
    """By digest; what the daemon does not know, the medium may.  ``spaces``: digests, each with an adapter to ask."""
    found = {one["digest"]: one["manifest"] for one in known if one["digest"] in spaces}
    for digest, adapter in spaces.items():
        if digest not in found:
            step = source.step(adapter, "manifest", bytes.fromhex(digest), "", 0)
            if step.get("manifest") is not None:
                found[digest] = step["manifest"]
    return found


def _by_tenant(spaces: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes of payload at rest, where the adapter does not count them by tenant itself."""
    nbytes: Counter[str] = Counter()
    for space in spaces:
        nbytes[tenant_of(json.dumps(space["manifest"]).encode())] += space["bytes"]
    return {name: {"bytes": size, "quota": None} for name, size in nbytes.items()}


def _begins(digest: str, word: str) -> bool:
    return len(word) >= 4 and digest.startswith(word.lower())


def _serde(number: int) -> str:
    from kvkeep.l2 import serde

    return next((name for name, about in serde.BUILT_IN.items() if about[0] == number), f"serde-{number}")


def _readable(manifest: Any) -> str:
    if not isinstance(manifest, dict):
        return "(its manifest is not known here)"
    flat = show.flatten(manifest)
    return ", ".join(f"{show.plain(name)}={show.short(value, 40)}" for name, value in list(flat.items())[:6])
