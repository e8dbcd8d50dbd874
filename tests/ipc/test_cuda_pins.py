"""The arena is pinned piece by piece, unpinned when no copy needs it any more, and never unmapped before."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.vllm.cuda import lane, pins
from kvkeep.ipc.vllm.cuda.driver import CudaError
from kvkeep.ipc.vllm.memory import Levels
from tests.conftest import Daemon
from tests.ipc.conftest import at_epoch, eventually, hashes
from tests.ipc.cuda_rig import FakeArena, Model, Task

PIECE, PIECES = 4096, 5
CHUNK = ((3, 4, 5, 9), (7, 8))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(pins, "RESERVE_POLL_S", 0.005)
    monkeypatch.setattr(lane, "HALF_BYTES", 512)


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.driver.register_gate.set()
    made.close()


def pinned(model: Model) -> int:
    return model.memory.levels().pinned


def test_the_whole_arena_is_pinned_in_pieces_and_unpinned_at_the_end(model: Model) -> None:
    assert model.memory.levels() == Levels(0, 0)
    arena = FakeArena(PIECES * PIECE - 100)  # the last piece is shorter
    model.client.watch(arena)
    model.client.watch(arena)  # told twice
    eventually(lambda: model.memory.levels() == Levels(arena.data.nbytes, arena.data.nbytes))
    assert model.driver.calls == [f"register {PIECE}"] * (PIECES - 1) + [f"register {PIECE - 100}"]
    model.memory.close()
    eventually(lambda: not model.memory.levels().pinned)
    assert model.driver.calls[PIECES:] == ["unregister"] * PIECES
    assert (model.memory.levels(), model.warnings) == (Levels(0, arena.data.nbytes), [])


def test_what_the_daemon_has_not_reserved_is_not_pinned(model: Model) -> None:
    arena = FakeArena(PIECES * PIECE)
    arena.ready = 2 * PIECE + 1
    model.client.watch(arena)
    eventually(lambda: pinned(model) == 2 * PIECE)
    time.sleep(0.05)
    assert pinned(model) == 2 * PIECE
    arena.ready = PIECES * PIECE
    eventually(lambda: pinned(model) == PIECES * PIECE)


def test_a_piece_that_cannot_be_pinned_costs_one_line_and_speed(model: Model) -> None:
    arena = FakeArena(PIECES * PIECE)
    model.driver.fail_register_after = 2
    model.client.watch(arena)
    eventually(lambda: model.warnings)
    (warning,) = model.warnings
    assert "out of memory" in warning
    assert model.memory.levels() == Levels(2 * PIECE, PIECES * PIECE)
    size = model.memory.bytes_of(CHUNK)
    for first in (0, 2 * PIECE - size // 2, 3 * PIECE):  # pinned, in between, not pinned
        view = arena.data[first : first + size]
        model.memory.gather_all([view], [CHUNK], model.memory.fence())
        wanted = np.zeros_like(view)
        model.cpu.gather(wanted, CHUNK)
        assert np.array_equal(view, wanted)
    assert model.memory.problem == ""


def test_trouble_with_pinning_does_not_stop_the_copies(model: Model) -> None:
    class Odd(FakeArena):
        def reserved(self) -> int:
            raise OSError("stale file handle")

    arena = Odd(PIECE)
    model.client.watch(arena)
    eventually(lambda: model.warnings)
    assert "stale file handle" in model.warnings[0]
    time.sleep(0.02)
    load(model, arena)  # its guard is not revoked


def test_what_cannot_be_unpinned_is_not_unmapped(model: Model) -> None:
    arena = FakeArena(PIECE)
    mapped = weakref.ref(arena.data)
    model.client.watch(arena)
    eventually(lambda: pinned(model))
    model.driver.fail_unregister = CudaError("cudaHostUnregister failed with code 700")
    model.client.watch(None)
    del arena
    eventually(lambda: model.warnings)
    model.memory.close()
    assert mapped() is not None
    pins._stuck.clear()
    model.driver.registered.clear()


def test_a_thread_that_cannot_reach_the_gpu_pins_nothing_and_ends(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def fails() -> None:
        assert gate.wait(10)
        raise CudaError("no device")

    monkeypatch.setattr(model.driver, "enter_thread", fails)
    pinner = pins.Pinner(model.driver, model.warnings.append)
    arena, gone = FakeArena(PIECE), []
    pinner.watch(arena)
    weakref.finalize(arena.data, gone.append, True)
    gate.set()
    eventually(lambda: model.warnings)
    assert model.warnings == ["nothing of the arena is pinned, so copies are slower: no device"]
    assert pinner.levels() == Levels(0, PIECE)
    time.sleep(0.02)
    assert not arena.guard.revoked, "copies go on"
    another = FakeArena(PIECE)
    pinner.watch(another)
    del arena
    eventually(lambda: gone)  # it keeps no mapping that it does not pin
    pinner.close()
    assert not another.guard.revoked
    assert model.driver.calls == []


def test_closing_while_a_piece_is_being_pinned_leaves_nothing_pinned(model: Model) -> None:
    arena = FakeArena(PIECES * PIECE)
    model.driver.register_gate.clear()
    model.client.watch(arena)
    assert model.driver.registering.wait(10)
    closing = Task(model.memory.close)
    time.sleep(0.02)
    model.driver.register_gate.set()
    assert closing.join().error is None
    eventually(lambda: model.driver.calls == [f"register {PIECE}", "unregister"])
    assert model.driver.registered == {}


@pytest.mark.parametrize("how", ["replaced", "closed", "gone"])
def test_an_arena_stays_pinned_and_mapped_until_its_last_copy_has_ended(model: Model, how: str) -> None:
    arena, after = FakeArena(PIECES * PIECE), FakeArena(2 * PIECE)
    at_its_end: list[dict[int, int]] = []
    weakref.finalize(arena.data, lambda: at_its_end.append(dict(model.driver.registered)))
    model.client.watch(arena)
    eventually(lambda: pinned(model) == PIECES * PIECE)
    model.driver.held = True
    loading = Task(load, model, arena)
    eventually(lambda: model.driver.submitted)
    arena.guard.revoke()
    if how == "replaced":
        model.client.watch(None)
        model.client.watch(after)
    elif how == "gone":
        model.client.watch(None)
    else:
        model.memory.close()
    del arena
    time.sleep(0.05)
    assert len(model.driver.registered) == PIECES
    assert not at_its_end
    while not loading.over:
        model.driver.run()
    assert loading.error is None
    del loading
    eventually(lambda: at_its_end)
    assert not at_its_end[0], "it was unmapped while it was pinned"
    if how == "replaced":
        eventually(lambda: model.memory.levels() == Levels(2 * PIECE, 2 * PIECE))
    assert len(model.driver.registered) == (2 if how == "replaced" else 0)


def load(model: Model, arena: FakeArena) -> None:
    with arena.guard.copying() as allowed:
        assert allowed
        view = arena.data[: model.memory.bytes_of(CHUNK)]
        model.memory.scatter_all([view], [CHUNK], model.memory.fence())


def test_news_of_an_arena_that_come_after_its_end_pin_nothing(model: Model) -> None:
    arena = FakeArena(PIECE)
    arena.guard.revoke()
    model.client.watch(arena)
    time.sleep(0.05)
    assert model.driver.calls == []
    another = FakeArena(PIECE)
    model.client.watch(another)
    eventually(lambda: list(model.driver.registered) == [another.data.ctypes.data])


def test_news_of_an_ended_arena_that_come_late_leave_the_one_that_is_there_pinned(model: Model) -> None:
    ended, live = FakeArena(PIECE), FakeArena(2 * PIECE)
    ended.guard.revoke()
    model.client.watch(live)
    eventually(lambda: pinned(model) == 2 * PIECE)
    model.client.watch(ended)
    time.sleep(0.05)
    assert model.memory.levels() == Levels(2 * PIECE, 2 * PIECE)
    load(model, live)  # its guard is not revoked


def test_pinning_takes_half_of_the_time_at_most(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for the driver while it pins."""
    now, said = [100.0], list[str]()
    monkeypatch.setattr(pins, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def register(address: int, size: int) -> None:
        now[0] += 3.0
        said.append("pinned")

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            said.append(f"paused {timeout:g}")
            return False

    monkeypatch.setattr(model.driver, "register", register)
    registration = pins.Registration(model.driver, FakeArena(3 * PIECE), model.warnings.append)
    registration._over = Over()
    registration._pin()
    assert said == ["pinned", "paused 3"] * 3


def test_an_arena_is_unpinned_in_the_pieces_that_it_was_pinned_in(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = FakeArena(4 * PIECE)
    model.client.watch(arena)
    eventually(lambda: pinned(model) == 4 * PIECE)
    monkeypatch.setattr(pins, "PIECE_BYTES", 4 * PIECE)
    size = model.memory.bytes_of(CHUNK)
    view = arena.data[PIECE - size // 2 :][:size]  # across a border: a copy over it would be a fault of the rig's
    model.memory.gather_all([view], [CHUNK], model.memory.fence())
    model.memory.close()
    eventually(lambda: not model.driver.registered)
    assert model.warnings == []


def test_close_does_not_wait_for_the_driver(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.client.watch(FakeArena(PIECE))
    model.driver.register_gate.clear()
    assert model.driver.registering.wait(10)
    waited: list[float | None] = []
    thread = model.memory._pinner._thread
    monkeypatch.setattr(thread, "join", waited.append)
    model.memory.close()
    model.driver.register_gate.set()
    assert waited == [pins.CLOSE_S]
    assert pins.CLOSE_S <= 0.2


def test_a_daemon_that_is_killed_during_a_copy_takes_no_memory_from_under_it(
    make_daemon: Callable[..., Daemon], model: Model
) -> None:
    daemon = make_daemon("--l1-slab-mb=1", l1_mib=16)
    size = model.memory.bytes_of(CHUNK)
    with Client.attach(daemon.run_dir) as kv:
        eventually(lambda: kv.stats()["l1"]["bytes_ready"] == kv.stats()["l1"]["bytes_total"])
        model.memory.use(kv)
        eventually(lambda: 0 < model.memory.levels().arena == pinned(model))
        namespace = kv.register({"model": "m"}, shard_bytes=size)
        with kv.reserve(namespace, hashes(2)) as reservation:
            with reservation.copying():
                model.memory.gather_all(reservation.views, [CHUNK, CHUNK], model.memory.fence())
            reservation.commit()
        reading = kv.open_read(kv.lookup(namespace, hashes(2)).hand_over(), 0, 0, 2)
        assert reading is not None
        before, count = dict(model.driver.registered), threading.active_count()
        model.driver.held = True
        loading = Task(read, model, reading)
        eventually(lambda: model.driver.submitted > 2)
        daemon.kill()
        eventually(lambda: not kv.attached)
        daemon.start()
        time.sleep(0.2)
        assert model.driver.registered == before
        assert not kv.attached, "it attaches only when the copy has ended"
        while not loading.over:
            model.driver.run()
        model.driver.held = False
        model.driver.run()
        assert loading.error is None
        at_epoch(kv, 2)
        eventually(lambda: 0 < model.memory.levels().arena == pinned(model))
        assert not set(before) & set(model.driver.registered)
        assert threading.active_count() <= count + 1
        del reading
    eventually(lambda: model.memory.levels().arena == 0)
    eventually(lambda: not model.driver.registered)


def read(model: Model, reading: object) -> None:
    with reading.copying() as allowed:  # type: ignore[attr-defined]
        assert allowed
        model.memory.scatter_all(reading.views, [((1, 2, 3, 4), (5, 6)), CHUNK], model.memory.fence())  # type: ignore[attr-defined]
