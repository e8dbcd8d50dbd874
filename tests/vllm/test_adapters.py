"""Adapters are told apart by their content, and whatever could have changed under the engine is not cached."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from vllm.lora.request import LoRARequest

from kvkeep.ipc.vllm import adapters
from kvkeep.ipc.vllm.adapters import MAX_TRIES, RETRY_S, Adapters, Checks, Files, salted_chain

WAIT_S = 20.0
LATER = 1e6  # the engine starts long after the files were written


class Engine:
    def __init__(self, *, started: float = LATER, **options: Any) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.adapters = Adapters(self.log.append, started=time.time() + started, clock=lambda: self.now, **options)

    def digest(self, request: LoRARequest) -> bytes | None:
        """After the reading thread is through with it."""
        self.adapters.digest(request)
        until = time.monotonic() + WAIT_S
        while self.adapters.reading(request):
            assert time.monotonic() < until
            time.sleep(0.001)
        return self.adapters.digest(request)


def write(folder: Path, *, value: int = 1, rank: int = 8, weights: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}, "lora_alpha": 16, "target_modules": ["q_proj"]}}')
    (folder / weights).write_bytes(bytes([value]) * 5000)
    return folder


def adapter(folder: Path | str, number: int = 1, name: str = "a", **more: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **more)


# ---- content ---------------------------------------------------------------------------------------------------------


def test_equal_content_has_an_equal_digest_in_every_engine_and_place(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    (two / "README.md").write_text("the engine does not read this")
    found = {Engine().digest(adapter(one)), Engine().digest(adapter(two, number=7, name="b"))}
    (digest,) = found
    assert digest is not None
    assert len(digest) == 32


def one_byte(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)


CHANGES: dict[str, Callable[[Path], object]] = {
    "one byte": one_byte,
    "config": lambda folder: write(folder, rank=16),
    "size": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\1" * 5001),
    "kind of file": lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
    "one more file": lambda folder: write(folder, weights="adapter_model.bin"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_content_has_another_digest(tmp_path: Path, change: str) -> None:
    write(tmp_path)
    before = Engine().digest(adapter(tmp_path))
    assert Engine().digest(adapter(tmp_path)) == before
    CHANGES[change](tmp_path)
    after = Engine().digest(adapter(tmp_path))
    assert None not in (before, after)
    assert after != before


def test_how_the_engine_uses_the_bytes_is_part_of_it(tmp_path: Path) -> None:
    write(tmp_path)
    found = [
        Engine().digest(adapter(tmp_path)),
        Engine(settings="lora_dtype=float32").digest(adapter(tmp_path)),
        Engine().digest(adapter(tmp_path, is_3d_lora_weight=True)),
    ]
    assert None not in found
    assert len(set(found)) == 3


# ---- changes under a running engine ----------------------------------------------------------------------------------


def swap_link(folder: Path) -> None:
    """The path is a link to a version, and the next version was there all along."""
    other = write(folder.parent / "other", value=2)
    link = folder.parent / "link"
    link.symlink_to(other)
    folder.rename(folder.parent / "moved")
    link.rename(folder)


def swap_folder(folder: Path) -> None:
    other = write(folder.parent / "other", value=2)
    folder.rename(folder.parent / "moved")
    other.rename(folder)


def keep_times(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    times = path.stat()
    one_byte(folder)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


UNDER_THE_ENGINE = CHANGES | {
    "exchanged link": swap_link,
    "exchanged folder": swap_folder,
    "times put back": keep_times,
    "removed": shutil.rmtree,
}


@pytest.mark.parametrize("change", UNDER_THE_ENGINE)
def test_an_adapter_that_changes_under_the_engine_is_unknown_from_then_on(tmp_path: Path, change: str) -> None:
    folder = write(tmp_path / "a")
    engine = Engine()
    request = adapter(folder)
    assert engine.digest(request) is not None
    files = engine.adapters.files(request)
    assert files is not None
    assert files.unchanged()
    UNDER_THE_ENGINE[change](folder)
    assert not files.unchanged()
    assert engine.digest(request) is None
    shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink(missing_ok=True)
    write(folder)  # the same content again does not help: the engine may have read the other
    engine.now += 1000
    assert engine.digest(request) is None
    (line,) = engine.log
    assert "its files changed" in line
    assert engine.digest(adapter(folder, number=2)) is not None  # loaded anew, under another id


def test_a_link_that_is_part_of_the_way_counts(tmp_path: Path) -> None:
    write(tmp_path / "v1" / "a")
    write(tmp_path / "v2" / "a", value=2)
    (tmp_path / "current").symlink_to("v1")
    engine = Engine()
    request = adapter(tmp_path / "current" / "a")
    assert engine.digest(request) == Engine().digest(adapter(tmp_path / "v1" / "a"))
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(tmp_path / "current")
    assert engine.digest(request) is None


def test_files_that_are_newer_than_the_engine_are_not_trusted(tmp_path: Path) -> None:
    """The engine may have loaded the adapter before they were written."""
    write(tmp_path)
    engine = Engine(started=-60)
    request = adapter(tmp_path)
    assert engine.digest(request) is None
    assert engine.digest(request) is None
    (line,) = engine.log
    assert "kvkeep.trust_new_adapters" in line
    assert Engine(started=-60, trust_new=True).digest(request) is not None


def test_times_that_a_program_set_do_not_make_files_old(tmp_path: Path) -> None:
    write(tmp_path)
    for path in (*tmp_path.iterdir(), tmp_path):
        os.utime(path, (1e9, 1e9))
    assert Engine(started=-60).digest(adapter(tmp_path)) is None


def test_a_folder_that_was_put_in_place_after_the_start_is_new(tmp_path: Path) -> None:
    write(tmp_path / "prepared")
    time.sleep(0.05)
    started = time.time() + adapters.SKEW_S  # between the two
    time.sleep(0.05)
    (tmp_path / "prepared").rename(tmp_path / "a")
    engine = Engine(started=started - time.time())
    assert engine.digest(adapter(tmp_path / "a")) is None


def test_loading_in_place_makes_the_id_unknown_for_ever(tmp_path: Path) -> None:
    write(tmp_path)
    engine = Engine()
    assert engine.digest(adapter(tmp_path)) is not None
    assert engine.digest(adapter(tmp_path, load_inplace=True)) is None
    assert engine.digest(adapter(tmp_path)) is None
    assert "load_inplace" in engine.log[0]
    assert len(engine.log) == 1


def test_an_id_that_stands_for_two_paths_is_unknown(tmp_path: Path) -> None:
    """The worker has loaded the first under this id, and serves it for both."""
    one, two = write(tmp_path / "one"), write(tmp_path / "two", value=2)
    engine = Engine()
    assert engine.digest(adapter(one)) is not None
    assert engine.digest(adapter(two)) is None
    assert engine.digest(adapter(one)) is None
    assert len(engine.log) == 1


# ---- files that are not there ----------------------------------------------------------------------------------------


def test_files_that_come_late_are_read_then(tmp_path: Path) -> None:
    engine = Engine()
    request = adapter(tmp_path / "a")
    assert engine.digest(request) is None
    write(tmp_path / "a")
    assert engine.digest(request) is None  # not looked at again so soon
    engine.now += RETRY_S
    assert engine.digest(request) is not None
    assert engine.log == []


@pytest.mark.parametrize("path", ["/no/such/folder", "nobody/no-such-adapter", "not a name at all:", "~nobody-here/x"])
def test_files_that_never_come_are_given_up_with_one_line(path: str) -> None:
    engine = Engine()
    for _ in range(MAX_TRIES + 3):
        assert engine.digest(adapter(path)) is None
        engine.now += RETRY_S
    (line,) = engine.log
    assert path in line
    assert "\n" not in line


def test_a_folder_without_weights_or_without_configuration_is_not_an_adapter(tmp_path: Path) -> None:
    for number, missing in enumerate(("adapter_config.json", "adapter_model.safetensors"), 1):
        folder = write(tmp_path / missing)
        (folder / missing).unlink()
        assert Engine().digest(adapter(folder, number=number)) is None


def test_a_name_of_the_hub_is_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--adapter"
    for number, commit in enumerate(("a" * 40, "b" * 40)):
        write(repository / "snapshots" / commit, value=number)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    engine = Engine()
    request = adapter("someone/adapter")
    assert engine.digest(request) == Engine().digest(adapter(repository / "snapshots" / ("a" * 40)))
    (repository / "refs" / "main").write_text("b" * 40)
    assert engine.digest(request) is None
    assert Engine().digest(request) == Engine().digest(adapter(repository / "snapshots" / ("b" * 40)))


def test_a_relative_folder_that_appears_later_is_not_the_adapter_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "cache" / "models--someone--adapter"
    write(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    engine = Engine()
    assert engine.digest(adapter("someone/adapter")) is not None
    write(tmp_path / "someone" / "adapter", value=2)
    assert engine.digest(adapter("someone/adapter")) is None


# ---- threads and bounds ----------------------------------------------------------------------------------------------


def test_reading_is_not_done_by_the_thread_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    write(tmp_path)
    readers: list[int] = []
    read = Adapters._read
    monkeypatch.setattr(Adapters, "_read", lambda *args: (readers.append(threading.get_ident()), read(*args))[1])
    engine = Engine()
    assert engine.digest(adapter(tmp_path)) is not None
    assert len(readers) == 1
    assert readers[0] != threading.get_ident()
    until = time.monotonic() + WAIT_S
    while any(thread.name == "kvkeep-adapters" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.001)


def test_many_adapters_at_once_are_all_read(tmp_path: Path) -> None:
    engine = Engine()
    requests = [adapter(write(tmp_path / str(n), value=n), number=n + 1) for n in range(50)]
    for request in requests:
        engine.adapters.digest(request)
    found = [engine.digest(request) for request in requests]
    assert None not in found
    assert len(set(found)) == 50


def test_an_error_while_reading_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    write(tmp_path)
    monkeypatch.setattr(adapters, "_folder", broken)
    engine = Engine()
    assert engine.digest(adapter(tmp_path)) is None
    assert engine.digest(adapter(tmp_path)) is None
    (line,) = engine.log
    assert "injected" in line


def test_the_number_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 3)
    folder = write(tmp_path)
    engine = Engine()
    found = [engine.digest(adapter(folder, number=n)) for n in range(1, 7)]
    assert [value is not None for value in found] == [True] * 3 + [False] * 3
    assert len(engine.log) == 1


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_a_salted_key_is_the_digest_of_block_hash_and_adapter() -> None:
    chain = bytes(range(32)) + b"\7" * 16 + b"\0" * 16  # the second is a shorter hash, filled up
    digest = b"\1" * 32
    salted = salted_chain(chain, digest)
    assert salted == blake3(chain[:32] + digest).digest() + blake3(chain[32:] + digest).digest()
    assert salted_chain(b"", digest) == b""


def test_no_two_adapters_have_a_key_in_common() -> None:
    chain = b"".join(blake3(bytes([n])).digest() for n in range(20))
    digests = [blake3(name).digest() for name in (b"a", b"b", b"c")]
    chains = [chain, *(salted_chain(chain, digest) for digest in digests)]
    for one, other in itertools.combinations(chains, 2):
        keys = [{text[at : at + 32] for at in range(0, len(text), 32)} for text in (one, other)]
        assert not keys[0] & keys[1]


def test_a_file_system_that_hangs_holds_up_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, hang = Files.look((str(tmp_path),)), threading.Event()
    checks = Checks()
    assert checks.unchanged(files, 10) is True
    monkeypatch.setattr(Files, "unchanged", lambda self: hang.wait(20))
    assert checks.unchanged(files, 0.01) is None
    assert checks.unchanged(files, 100) is None  # at once: the first still hangs
    hang.set()
    until = time.monotonic() + 10
    while not checks.unchanged(files, 1):
        assert time.monotonic() < until
        time.sleep(0.01)
