"""An adapter of one's own, as a third party would write it, that tells in a file what it is asked to do.

    {"type": "plugin", "module_path": "tests.l2.slow_adapter", "class_name": "SlowAdapter", "folder": "...",
     "store_s": 0.0, "load_s": 0.0, "mover": {"MAX_ASIDE_S": 9}}

While the folder holds a file `fail`, every call says IO_ERROR; while it holds `raise`, every call raises; with
`refuse`, `open` does; with `trouble`, it has some, and calls fail too; with `hold`, loads wait.  ``mover``: other
constants for the mover that it runs in.
Objects are files of the payload alone: this is no example for a medium.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvkeep.l2 import mover
from kvkeep.l2.adapter import MISS, OK, Adapter, AdapterError, Item, Key, Listing, Outcome, Result, Usage


class SlowAdapter(Adapter):
    type_name = "slow"

    def __init__(self, config: Mapping[str, object]) -> None:
        self.counters: Counter[str] = Counter()
        self._folder = Path(str(config["folder"]))
        self._store_s = float(str(config.get("store_s", 0)))
        self._load_s = float(str(config.get("load_s", 0)))
        for name, value in dict(config.get("mover", {})).items():  # type: ignore[call-overload]
            setattr(mover, name, value)

    def _said(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _tell(self, what: str, keys: Sequence[Key]) -> bool:
        """True = go on."""
        with (self._folder / "log").open("a") as log:
            log.write("".join(f"{what} {key.chunk.hex()} {key.shard}\n" for key in keys))
        if self._said("raise"):
            raise RuntimeError("as asked")
        return not self._said("fail") and not self.trouble()

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key.namespace.hex()[:8]}-{key.chunk.hex()}-{key.shard}"

    def open(self) -> None:
        if self._said("refuse"):
            raise AdapterError("the folder says no: remove its file 'refuse'")

    def trouble(self) -> str:
        return "the folder has a file 'trouble'" if self._said("trouble") else ""

    def lookup(self, keys: Sequence[Key]) -> list[bool]:
        self._tell("lookup", keys)
        return [self._path(key).exists() for key in keys]

    def store(self, items: Sequence[Item]) -> list[Result]:
        if not self._tell("store", [key for key, *_ in items]):
            return [Result(Outcome.IO_ERROR, 5, "as asked")] * len(items)
        time.sleep(self._store_s)
        for key, payload, *_ in items:
            self._path(key).write_bytes(payload)
        return [OK] * len(items)

    def load(self, items: Sequence[tuple[Key, memoryview]]) -> list[Result]:
        if not self._tell("load", [key for key, _ in items]):
            return [Result(Outcome.IO_ERROR, 5, "as asked")] * len(items)
        time.sleep(self._load_s)
        while self._said("hold"):
            time.sleep(0.01)
        results = []
        for key, view in items:
            try:
                view[:] = self._path(key).read_bytes()
                results.append(OK)
            except FileNotFoundError:
                results.append(MISS)
        return results

    def delete(self, keys: Sequence[Key]) -> int:
        self._tell("delete", keys)
        there = [key for key in keys if self._path(key).exists()]
        for key in there:
            self._path(key).unlink()
        return len(there)

    def list(self, cursor: bytes, limit: int) -> Listing:
        with (self._folder / "log").open("a") as log:
            log.write("list\n")
        return Listing([], b"")

    def usage(self) -> Usage:
        count = sum(path.name.count("-") == 2 for path in self._folder.iterdir())
        return Usage(count, 1 << 30, count)

    def close(self) -> None:
        with (self._folder / "log").open("a") as log:
            log.write("close\n")
