"""What a LoRA adapter holds, so that KV computed with it is found by what the adapter is and not by what it is called.

vLLM's block hash covers an adapter's name and path, and its worker knows an adapter by its integer id alone.  So the
key of a chunk of a LoRA request is blake3(key of the block hash || digest of the adapter); a request of the base
model keeps its key.  Two engines share what they computed with one adapter if they call it the same and its files are
equal; if the files differ in one byte they do not.

The engine reads an adapter's files at a moment that we do not see: with the first step that needs it, when somebody
calls `add_lora` long before, or again after it had to make room for others.  A digest is therefore given only while no
moment matters, because the files have been the same all the time:

* their last change (ctime, which no program can set) lies before the engine's start, and
* device, inode, size and times of files and links are those of the first look, each time a request asks, and, through
  `Files.unchanged`, once more after its KV was copied and before it is published.

An adapter for which that does not hold is unknown *for the rest of the engine's life*: the engine may hold the old
bytes or the new, and no waiting tells which.  An adapter that is loaded anew under another id starts anew.  Unknown,
too, is an id that was used with ``load_inplace`` or with two paths, since what it stands for changes without a sign.
Requests of unknown adapters are not cached; one log line says why.

``trust_new`` is for fleets that bring adapters while the engine runs, each into a place of its own that is not written
again: then the first look counts whatever the age of the files.

Not seen: a parent folder that is exchanged by renaming, between the engine's first reading and our first look.

`digest` belongs to the engine's thread.  Files are read, whole, in a thread that lives while there is something to
read, and looked at again in one of their own (`Checks`), since a file system may hang.
"""

from __future__ import annotations

import enum
import os
import queue
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from kvkeep.ipc.messages import HASH_BYTES

CONFIG = "adapter_config.json"
WEIGHTS = (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_model.pt",
)  # the engine reads the first that is there
FORMAT = b"lora/1\0"
READ_BYTES = 1 << 20
SKEW_S = 2.0  # clocks of file systems are coarse
RETRY_S, MAX_TRIES = 1.0, 10  # files that are not there yet
CHECK_S = 0.5  # a look at files takes some 0.02 ms, where they can be looked at
MAX_ADAPTERS = 65_536
MAX_LINKS = 40
SETTINGS = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")


def salted_chain(chain: bytes, digest: bytes) -> bytes:
    """The keys of a LoRA request's chunks (32 bytes each, as in `chain`), from those of its block hashes."""
    keys = (chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES))
    return b"".join(blake3(key + digest).digest() for key in keys)


def settings_text(lora_config: Any) -> str:
    """What the engine does with an adapter's bytes, beyond what its files say."""
    return repr([(name, str(getattr(lora_config, name, None))) for name in SETTINGS])


class Files(NamedTuple):
    """Files and links as they were at one moment.  Plain values: it travels to the worker with a store job."""

    paths: tuple[str, ...]  # also of files that are not there
    stats: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def look(cls, paths: tuple[str, ...]) -> Files:
        return cls(paths, tuple(_stat(path) for path in paths))

    def unchanged(self) -> bool:
        return all(_stat(path) == before for path, before in zip(self.paths, self.stats, strict=True))

    def newest_change(self) -> float:
        """Seconds since the epoch."""
        return max((known[-1] / 1e9 for known in self.stats if known is not None), default=0.0)


def _stat(path: str) -> tuple[int, ...] | None:
    """Of a link itself, not of where it points to: both are in the list.  A folder's times tell of any file in it."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino, 0
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Checks:
    """`Files.unchanged` with a deadline.  For one thread; what hangs holds up nobody a second time."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Files, list[bool], threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last = threading.Event()
        self._last.set()

    def unchanged(self, files: Files, wait_s: float) -> bool | None:
        """None = it could not be told in time."""
        if not self._last.is_set():
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvkeep-files", daemon=True)
            self._thread.start()
        answer: list[bool] = []
        self._last = threading.Event()
        self._queue.put((files, answer, self._last))
        self._last.wait(wait_s)
        return answer[0] if answer else None

    def _run(self) -> None:
        while True:
            files, answer, done = self._queue.get()
            answer.append(files.unchanged())
            done.set()


class Keys:
    """What the chunks of a request are called.  One thread, the engine's."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self._adapters = adapters

    def chain(self, request: Any, active: Any, chunks: int) -> bytes | None:
        """32 bytes for each of the first ``chunks``.  None: it has an adapter that is not known."""
        if request.lora_request is None:
            chain: bytes = active.chain(request, chunks)
            return chain
        digest = self._adapters.digest(request.lora_request) if self._adapters is not None else None
        return salted_chain(active.chain(request, chunks), digest) if digest is not None else None

    def reading(self, request: Any) -> bool:
        """Its adapter may be known in a moment."""
        return self._adapters is not None and self._adapters.reading(request.lora_request)

    def files(self, request: Any) -> Files | None:
        """That its KV depends on, beside the model's."""
        if request.lora_request is None or self._adapters is None:
            return None
        return self._adapters.files(request.lora_request)


class Unknowable(Exception):
    """One sentence: why this adapter is never cached by this engine."""


class NotThere(Exception):
    """One sentence: what is missing; it may still come."""


class _Phase(enum.Enum):
    QUEUED = "queued"  # until the thread has read it
    KNOWN = "known"
    MISSING = "missing"
    UNKNOWABLE = "unknowable"


@dataclass
class _Adapter:
    name: str
    path: str
    wide: bool  # is_3d_lora_weight: how the engine reads the same bytes
    phase: _Phase = _Phase.QUEUED
    digest: bytes = b""
    files: Files | None = None
    tries: int = 0
    retry_at: float = 0.0


class Adapters:
    """What is known of each adapter id.  `started` is the wall clock's time at the engine's start."""

    def __init__(
        self,
        log: Callable[[str], None],
        *,
        settings: str = "",
        trust_new: bool = False,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._settings, self._clock = log, settings, clock
        self._too_new = None if trust_new else (time.time() if started is None else started) - SKEW_S
        self._adapters: dict[int, _Adapter] = {}
        self._lock = threading.Lock()
        self._queue: deque[_Adapter] = deque()
        self._thread: threading.Thread | None = None
        self._full = False
        self._checks = Checks()

    def digest(self, lora_request: Any) -> bytes | None:
        """32 bytes.  None: not known yet, or not to be known; such a request is not cached."""
        adapter = self._adapter(lora_request)
        if adapter is None or adapter.phase is _Phase.QUEUED:
            return None
        if adapter.phase is _Phase.MISSING and self._clock() >= adapter.retry_at:
            self._read_later(adapter)
        if adapter.phase is not _Phase.KNOWN:
            return None
        assert adapter.files is not None
        unchanged = self._checks.unchanged(adapter.files, CHECK_S)
        if unchanged is None:
            return None
        if not unchanged:
            self._give_up(adapter, "its files changed after the engine may have read them")
            return None
        return adapter.digest

    def reading(self, lora_request: Any) -> bool:
        """Its digest may come in a moment."""
        adapter = self._adapters.get(lora_request.lora_int_id)
        return adapter is not None and adapter.phase is _Phase.QUEUED

    def files(self, lora_request: Any) -> Files | None:
        """As they were when they were read; for the check after the KV was copied."""
        adapter = self._adapters.get(lora_request.lora_int_id)
        return adapter.files if adapter is not None else None

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _adapter(self, lora_request: Any) -> _Adapter | None:
        number = lora_request.lora_int_id
        path, wide = str(lora_request.lora_path), bool(getattr(lora_request, "is_3d_lora_weight", False))
        adapter = self._adapters.get(number)
        if adapter is None:
            if len(self._adapters) >= MAX_ADAPTERS:
                if not self._full:
                    self._log(f"kvkeep: more than {MAX_ADAPTERS} adapters since the start: further ones are not cached")
                self._full = True
                return None
            adapter = self._adapters[number] = _Adapter(str(lora_request.lora_name), path, wide)
            self._read_later(adapter)
        if getattr(lora_request, "load_inplace", False):
            self._give_up(adapter, "it is loaded with load_inplace, which may exchange it under its id at any time")
        elif (path, wide) != (adapter.path, adapter.wide):
            self._give_up(adapter, f"its id {number} was also used for {path}")
        return adapter

    def _give_up(self, adapter: _Adapter, why: str) -> None:
        with self._lock:
            before, adapter.phase = adapter.phase, _Phase.UNKNOWABLE
        if before is not _Phase.UNKNOWABLE:
            self._log(f"kvkeep: requests with adapter {adapter.name!r} ({adapter.path}) are not cached: {why}")

    def _read_later(self, adapter: _Adapter) -> None:
        with self._lock:
            adapter.phase = _Phase.QUEUED
            self._queue.append(adapter)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvkeep-adapters", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                adapter = self._queue.popleft()
            try:
                files, digest = self._read(adapter)
            except (NotThere, OSError) as error:
                self._missing(adapter, str(error))
            except Exception as error:
                self._give_up(adapter, str(error))
            else:
                with self._lock:
                    if adapter.phase is _Phase.QUEUED:  # the engine's thread may have given it up meanwhile
                        adapter.files, adapter.digest, adapter.phase = files, digest, _Phase.KNOWN

    def _missing(self, adapter: _Adapter, why: str) -> None:
        adapter.tries += 1
        if adapter.tries >= MAX_TRIES:
            self._give_up(adapter, f"{why} ({MAX_TRIES} tries)")
            return
        with self._lock:
            if adapter.phase is _Phase.QUEUED:
                adapter.retry_at, adapter.phase = self._clock() + RETRY_S, _Phase.MISSING

    def _read(self, adapter: _Adapter) -> tuple[Files, bytes]:
        folder, more = _folder(adapter.path)
        present = [folder / name for name in (CONFIG, *WEIGHTS) if (folder / name).is_file()]
        if not present or present[0].name != CONFIG or len(present) < 2:
            raise NotThere(f"{folder} does not hold {CONFIG} and one of {', '.join(WEIGHTS)}")
        watched = [folder / name for name in (CONFIG, *WEIGHTS)] + more
        paths = tuple(dict.fromkeys(str(step) for path in [folder, *watched] for step in _way(path)))
        files = Files.look(paths)
        if self._too_new is not None:
            newest = max(files.newest_change(), folder.stat().st_ctime)
            if newest > self._too_new:
                raise Unknowable(
                    "its files were written after the engine's start, and it may have read others before; bring them "
                    "before the start, or set kvkeep.trust_new_adapters if their files are never changed in place"
                )
        digest = blake3(FORMAT + f"{self._settings}\0{adapter.wide}\0".encode())
        for path in present:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while piece := file.read(READ_BYTES):
                    digest.update(piece)
        if not files.unchanged():
            raise NotThere(f"files in {folder} are being written")
        return files, digest.digest()


def _folder(lora_path: str) -> tuple[Path, list[Path]]:
    """Where the engine finds the files (vllm.lora.utils.get_adapter_absolute_path), and what else decides that."""
    path = Path(lora_path).expanduser()
    here = Path.cwd() / path
    if path.is_absolute() or here.exists():
        return here, []
    from huggingface_hub import try_to_load_from_cache

    if os.environ.get("VLLM_USE_MODELSCOPE", "0").lower() in ("1", "true"):
        raise Unknowable("names of ModelScope are not resolved here: give a folder")
    try:
        found = try_to_load_from_cache(lora_path, CONFIG)
    except ValueError:  # not even a name of a repository
        found = None
    if not isinstance(found, str):
        raise NotThere(f"{lora_path} is neither a folder nor in the local cache")
    folder = Path(found).parent  # .../snapshots/COMMIT
    return folder, [here, folder.parent.parent / "refs" / "main"]


def _way(path: Path) -> list[Path]:
    """The path, and each symbolic link on the way to what it names."""
    links: list[Path] = []
    to_do = [path]
    while to_do and len(links) < MAX_LINKS:
        at = to_do.pop()
        for part in (at, *at.parents):
            if part not in links and part.is_symlink():
                links.append(part)
                to_do.append(part.parent / part.readlink())
    return [path.resolve(), *links]
