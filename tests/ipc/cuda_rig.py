"""KV memory of a made-up model on a made-up GPU, beside the same on a CPU; and arenas to copy to."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvkeep.ipc.client_arena import Guard
from kvkeep.ipc.vllm.cuda.memory import CudaMemory
from kvkeep.ipc.vllm.memory import PlaneShape
from kvkeep.ipc.vllm.pages import Pages, Plane
from kvkeep.ipc.vllm.places import Place, Places
from tests.ipc.conftest import eventually
from tests.ipc.fake_cuda import WAIT_S, FakeDriver

BLOCKS = 24


class FakeArena:
    """What the pin thread needs of a client_arena.Arena, in pages of its own."""

    def __init__(self, size: int) -> None:
        self.data = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.guard = Guard()
        self.ready = size

    def reserved(self) -> int:
        return self.ready


class Watched:
    """A client whose arenas the test provides."""

    def __init__(self) -> None:
        self.watch: Callable[[Any], None] = lambda arena: None

    def watch_arena(self, watcher: Callable[[Any], None]) -> None:
        self.watch = watcher


class Model:
    """Two groups, the first of two planes: 3 layers of 96 bytes, 1 of 32; 2 layers of 64."""

    def __init__(self, order: str = "LB", padding: int = 0, seed: int = 1) -> None:
        """``order``: which is outermost in the engine's memory, layers ("LB") or blocks ("BL")."""
        self.driver = FakeDriver()
        self.warnings: list[str] = []
        self.memories: list[np.ndarray] = []
        places, planes = [], []
        for shapes in ([PlaneShape(3, 96), PlaneShape(1, 32)], [PlaneShape(2, 64)]):
            made = [self._plane(shape, order, padding, seed) for shape in shapes]
            places.append([place for place, _ in made])
            planes.append([plane for _, plane in made])
        self.cpu = Pages(planes, [16, 32])  # sees the same bytes
        self.memory = CudaMemory(
            Places(places, [16, 32], SimpleNamespace(type="cuda")), self.driver, self.warnings.append
        )
        self.client = Watched()
        self.memory.use(self.client)

    def _plane(self, shape: PlaneShape, order: str, padding: int, seed: int) -> tuple[Place, Plane]:
        stride = shape.page_bytes + padding
        layer, block = (stride * BLOCKS, stride) if order == "LB" else (stride, stride * shape.layers)
        raw = np.random.default_rng(seed + len(self.memories)).integers(
            0, 256, stride * BLOCKS * shape.layers, dtype=np.uint8
        )
        self.memories.append(raw)
        view = np.lib.stride_tricks.as_strided(raw, (shape.layers, BLOCKS, shape.page_bytes), (layer, block, 1))
        return Place(shape, BLOCKS, int(raw.ctypes.data), layer, block, raw), Plane(view)

    def contents(self) -> bytes:
        return b"".join(memory.tobytes() for memory in self.memories)

    def close(self) -> None:
        self.driver.held, self.driver.compute_busy = False, False
        self.driver.complete_fences()
        self.memory.close()
        eventually(lambda: not self.driver.registered)
        assert self.driver.faults == []


class Task:
    """A call in a thread of its own, as the copy threads make them."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self.error = error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> Task:
        self._thread.join(WAIT_S)
        assert self.over, "it does not end"
        return self
