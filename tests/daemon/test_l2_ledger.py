"""What is remembered to be removed holds for the medium, whatever else of the configuration changes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from kvkeep.daemon.media import media_of
from kvkeep.ipc.errors import Unavailable
from tests.conftest import Daemon
from tests.daemon import l2_helpers as h
from tests.ipc.conftest import eventually

PLAIN: dict[str, Any] = {"type": "fs", "capacity_gb": 0.5, "fsync": "none"}


def cleared_while_away(make_daemon: h.Make, config: dict[str, Any]) -> Daemon:
    """A daemon that was killed while its adapter could not be reached for a clear of eight chunks."""
    daemon = make_daemon(h.adapter(**config))
    with h.attach(daemon) as kv:
        ns, keys = h.register(kv), h.chain(1, 8)
        h.store(kv, ns, keys)
        h.stored(kv, 8)
        pid = h.row(kv)["pid"]
        os.kill(pid, signal.SIGSTOP)

        def clear() -> None:
            with pytest.raises(Unavailable):
                kv.clear(ns)

        thread = threading.Thread(target=clear)
        thread.start()
        eventually(lambda: (daemon.run_dir / "l2-removals").exists())
        daemon.kill()
        os.kill(pid, signal.SIGKILL)
        thread.join()
    return daemon


def started_with(daemon: Daemon, *adapters: str) -> Daemon:
    daemon.flags = [daemon.flags[0], *adapters]
    return daemon.start()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"capacity_gb": 0.6},
        {"fsync": "data"},
        {"name": "kv", "threads": 2},
        {"base_path": ["{0}/other", "{0}/kv/"]},
        {"base_path": "{0}/./kv"},
    ],
)
def test_what_was_cleared_stays_away_when_an_option_changes(
    make_daemon: h.Make, tmp_path: Path, change: dict[str, Any]
) -> None:
    daemon = cleared_while_away(make_daemon, {**PLAIN, "base_path": f"{tmp_path}/kv"})
    paths = change.get("base_path", "{0}/kv")
    here = [p.format(tmp_path) for p in paths] if isinstance(paths, list) else paths.format(tmp_path)
    started_with(daemon, h.adapter(**{**PLAIN, **change, "base_path": here}))
    with h.attach(daemon) as kv:
        assert h.read(kv, h.register(kv), h.chain(1, 8), wait_s=2) == 0
        eventually(lambda: h.row(kv)["removals_pending"] == 0)
        eventually(lambda: kv.stats()["health"] == "ok")
        eventually(lambda: not (daemon.run_dir / "l2-removals").exists())
        assert h.read(kv, h.register(kv), h.chain(1, 8), wait_s=2) == 0


def test_what_waits_for_a_medium_that_no_adapter_has_is_told_and_done_when_one_has(
    make_daemon: h.Make, tmp_path: Path
) -> None:
    daemon = cleared_while_away(make_daemon, {**PLAIN, "base_path": f"{tmp_path}/kv"})
    other = h.adapter(**{**PLAIN, "base_path": f"{tmp_path}/other"})
    started_with(daemon, other)
    with h.attach(daemon) as kv:
        eventually(lambda: kv.stats()["health"] == "degraded")
        (reason,) = kv.stats()["reasons"]
        assert f"1 clears or deletes are still to be done on fs {tmp_path}/kv, which no --l2-adapter has" in reason
        h.store(kv, h.register(kv), h.chain(1, 8))
        h.stored(kv, 8)
        kv.clear()  # what is done here takes nothing of what is remembered
    daemon.kill()
    started_with(daemon, other, h.adapter(**{**PLAIN, "base_path": f"{tmp_path}/kv"}))
    with h.attach(daemon) as kv:
        eventually(lambda: kv.stats()["health"] == "ok")
        assert h.read(kv, h.register(kv), h.chain(1, 8), wait_s=2) == 0


def test_media_are_told_apart_by_where_they_are_and_by_nothing_else() -> None:
    raw = {"type": "raw_block", "path": "/dev/a/../b", "size_gb": 3, "name": "x"}
    assert media_of(raw) == ["raw_block /dev/b"]
    assert media_of({"type": "fault_inject", "inner": raw, "faults": []}) == ["raw_block /dev/b"]
    assert media_of({"type": "fs", "base_path": ["/b", "/a/"], "shared": True}) == ["fs /b", "fs /a"]
    plugin = {"type": "plugin", "module_path": "m", "class_name": "C", "bucket": "k", "parts": ["p", "q"], "size": 3}
    assert media_of(plugin) == media_of({**plugin, "size": 4, "name": "new", "serde": "zstd"})
    assert media_of(plugin) != media_of({**plugin, "bucket": "l"})
    assert media_of({"type": "mock"}) == ["mock"]
