"""The attach socket: admission, descriptors, leases that end with their connection, and peers that
misbehave."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvkeep.ipc.attach import Admission, AttachListener, AttachRefused, Credentials, connect, frame
from kvkeep.ipc.messages import MAX_ATTACH_FRAME_BYTES, Hello, Refused, Welcome

HELLO = Hello(versions=(1,), name="test", want_arena=True, abi=1)


class Door:
    """An AttachListener served by its own thread, which records what it was asked."""

    def __init__(self, path: Path, **options: float) -> None:
        self.path = str(path)
        self.hellos: list[tuple[Hello, Credentials]] = []
        self.closed: list[int] = []
        self.skewed: list[Refused] = []
        self.answer: Refused | Exception | None = None
        self.version = 1
        self.listener = AttachListener(
            self.path,
            admit=self.admit,
            closed=self.closed.append,
            skewed=self.skewed.append,
            **options,  # type: ignore[arg-type]
        )
        self.stop = os.eventfd(0)
        self.drops: list[int] = []
        self.stopping = False
        self.rounds = 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def admit(self, hello: Hello, who: Credentials) -> Admission | Refused:
        self.hellos.append((hello, who))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        fds = tuple(os.memfd_create(n) for n in ("meta", "data", "event")) if hello.want_arena else ()
        lease_id = len(self.hellos)
        return Admission(Welcome(0, b"L" * 16, lease_id, 7, "boot", "ipc:///x", 1, 2, 256), fds)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.listener.fileno(), select.POLLIN)
        poll.register(self.stop, select.POLLIN)
        while True:
            deadline = self.listener.next_deadline()
            wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = [fd for fd, _ in poll.poll(wait)]
            self.rounds += 1
            if self.stop in ready:
                os.eventfd_read(self.stop)
                while self.drops:  # one read may stand for several writes
                    self.listener.drop(self.drops.pop())
                if self.stopping:
                    return
            self.listener.service()
            self.listener.expire(time.monotonic())

    def drop(self, lease_id: int) -> None:
        self.drops.append(lease_id)
        os.eventfd_write(self.stop, 1)

    def settle(self) -> None:
        """Return when the thread has finished what it was doing."""
        before = self.rounds
        self.drop(10**9)
        eventually(lambda: self.rounds > before and not self.drops)

    def close(self) -> None:
        self.stopping = True
        os.eventfd_write(self.stop, 1)
        self.thread.join()
        self.listener.close()
        os.close(self.stop)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    before = set(os.listdir("/proc/self/fd"))
    door = Door(tmp_path / "attach.sock", handshake_s=60.0, max_connections=8)
    yield door
    door.close()
    assert not os.path.exists(door.path)
    assert len(os.listdir("/proc/self/fd")) <= len(before), "a descriptor leaked"


def eventually(condition: object, within_s: float = 30.0) -> None:
    assert callable(condition)
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.005)


def raw(door: Door) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(door.path)
    return sock


def answer(sock: socket.socket) -> bytes:
    """All bytes until EOF."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            data += piece
    return data


def finish(sock: socket.socket, fds: list[int]) -> None:
    sock.close()
    for fd in fds:
        os.close(fd)


def test_a_client_gets_its_lease_and_three_descriptors_that_close_on_exec(door: Door) -> None:
    sock, welcome, fds = connect(door.path, HELLO, 30)
    assert (welcome.version, welcome.lease_id, welcome.epoch) == (1, 1, 7)
    assert len(fds) == 3
    assert not any(os.get_inheritable(fd) for fd in fds)
    hello, who = door.hellos[0]
    assert hello == HELLO
    assert who == (os.getpid(), os.getuid(), os.getgid())
    finish(sock, fds)
    eventually(lambda: door.closed == [1])


def test_a_management_client_gets_no_descriptors(door: Door) -> None:
    sock, _, fds = connect(door.path, msgspec.structs.replace(HELLO, want_arena=False), 30)
    assert fds == []
    finish(sock, fds)


def test_the_end_of_the_connection_is_reported_once_and_only_for_the_admitted(door: Door) -> None:
    sock, _, fds = connect(door.path, HELLO, 30)
    raw(door).close()
    other, _, more = connect(door.path, HELLO, 30)
    finish(sock, fds)
    eventually(lambda: door.closed == [1])
    finish(other, more)
    eventually(lambda: door.closed == [1, 2])


def test_the_daemon_can_drop_a_client(door: Door) -> None:
    sock, _, fds = connect(door.path, HELLO, 30)
    door.drop(1)
    sock.settimeout(30)
    assert sock.recv(1) == b""
    eventually(lambda: door.closed == [1])
    door.drop(99)  # unknown: nothing happens
    finish(sock, fds)


def test_a_refusal_reaches_the_client_with_its_code_and_sentence(door: Door) -> None:
    door.answer = Refused("denied", "uid 5 is not in the list; add it")
    with pytest.raises(AttachRefused, match="uid 5") as caught:
        connect(door.path, HELLO, 30)
    assert caught.value.code == "denied"
    assert door.closed == []


def test_no_common_version_is_refused_before_anybody_is_asked(door: Door) -> None:
    with pytest.raises(AttachRefused, match="upgrade the daemon") as caught:
        connect(door.path, Hello(versions=(98, 99)), 30)
    assert caught.value.code == "version"
    assert door.hellos == []
    assert [refused.message for refused in door.skewed] == [caught.value.message]


def test_the_highest_common_version_is_chosen(door: Door) -> None:
    sock, welcome, fds = connect(door.path, msgspec.structs.replace(HELLO, versions=(1, 50)), 30)
    assert welcome.version == 1
    finish(sock, fds)


def test_a_bug_while_admitting_is_one_clients_problem(door: Door) -> None:
    door.answer = ZeroDivisionError()
    with pytest.raises(AttachRefused, match="log"):
        connect(door.path, HELLO, 30)
    door.answer = None
    finish(*connect(door.path, HELLO, 30)[::2])


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff\xff\xff\xff",  # a frame of 4 GiB
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 0),
        struct.pack("<I", 400) + b"\x91" * 400,  # nested arrays
        frame(Refused("x", "y")),
        struct.pack("<I", 12) + msgspec.msgpack.encode({"type": "hello"}),  # a field is missing
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_noise_instead_of_a_hello_is_refused(door: Door, noise: bytes) -> None:
    with raw(door) as sock:
        sock.sendall(noise)
        assert b"refused" in answer(sock)
    assert door.hellos == []
    finish(*connect(door.path, HELLO, 30)[::2])


def test_a_hello_in_single_bytes_is_a_hello(door: Door) -> None:
    with raw(door) as sock:
        for byte in frame(HELLO):
            sock.sendall(bytes([byte]))
        assert b"welcome" in sock.recv(65536)


def test_a_client_that_does_not_say_hello_is_dropped(tmp_path: Path) -> None:
    door = Door(tmp_path / "attach.sock", handshake_s=0.1)
    with raw(door) as sock:
        sock.sendall(b"\x05")
        assert b"Hello within" in answer(sock)
    door.close()


def test_an_admitted_client_may_be_silent_for_ever_but_not_noisy(tmp_path: Path) -> None:
    door = Door(tmp_path / "attach.sock", handshake_s=2.0)
    sock, _, fds = connect(door.path, HELLO, 30)
    eventually(lambda: door.listener.next_deadline() is None)  # none for the admitted
    sock.settimeout(30)
    sock.sendall(b"x" * 1000)
    door.settle()
    door.settle()
    assert door.closed == []
    with contextlib.suppress(OSError):
        for _ in range(100):
            sock.sendall(b"x" * 10000)
    eventually(lambda: door.closed == [1])
    finish(sock, fds)
    door.close()


def test_a_full_house_is_refused_with_the_limit(door: Door) -> None:
    inside = [connect(door.path, HELLO, 30) for _ in range(8)]
    with pytest.raises(AttachRefused, match="8 connections") as caught:
        connect(door.path, HELLO, 30)
    assert caught.value.code == "limit"
    for sock, _, fds in inside:
        finish(sock, fds)
    eventually(lambda: len(door.closed) == 8)
    finish(*connect(door.path, HELLO, 30)[::2])


def test_silent_connections_cannot_lock_a_client_out(door: Door) -> None:
    silent = [raw(door) for _ in range(40)]
    finish(*connect(door.path, HELLO, 30)[::2])
    for sock in silent:
        sock.close()


def test_running_out_of_descriptors_does_not_spin_and_passes(door: Door) -> None:
    inside = [connect(door.path, HELLO, 30) for _ in range(3)]
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    door.settle()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, limits[1]))
    try:
        before = door.rounds
        for sock in waiting:
            sock.connect(door.path)
            sock.sendall(frame(HELLO))
        time.sleep(0.35)
        assert door.rounds - before < 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for sock in waiting:
        sock.settimeout(30)
        assert b"welcome" in sock.recv(65536)
        sock.close()
    for sock, _, fds in inside:
        finish(sock, fds)
    eventually(lambda: len(door.closed) == len(door.hellos))


def test_a_stale_socket_file_is_replaced_and_a_strange_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "attach.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    door = Door(path)
    assert path.stat().st_mode & 0o777 == 0o660
    door.close()
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="not a socket"):
        Door(path)
    assert path.read_text() == "mine"


def test_a_path_that_is_too_long_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"limit is 107.*--run-dir"):
        Door(tmp_path / ("x" * 120))
    with pytest.raises(ValueError, match="limit is 107"):
        connect(str(tmp_path / ("x" * 120)), HELLO, 1)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (frame(Welcome(1, b"L" * 16, 1, 7, "b", "ipc:///x", 1, 2, 256)), "passed 0 descriptors"),
        (frame(HELLO), "not Welcome"),
        (b"\xff\xff\xff\x7f", "over the limit"),
        (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "not readable"),
        (b"", "closed"),
        (b"\x08\x00", "closed"),
    ],
)
def test_a_strange_daemon_is_an_error_and_leaves_nothing_open(tmp_path: Path, reply: bytes, error: str) -> None:
    path = str(tmp_path / "s")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()

    def serve() -> None:
        peer, _ = server.accept()
        peer.recv(65536)
        peer.sendall(reply)
        peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=error):
        connect(path, HELLO, 30)
    thread.join()
    assert len(os.listdir("/proc/self/fd")) <= before
    server.close()


def test_a_daemon_that_does_not_answer_costs_the_deadline_and_no_more(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    with pytest.raises(ConnectionRefusedError):
        connect(path, HELLO, 0.05)
    server.listen(0)
    with pytest.raises(TimeoutError):
        connect(path, HELLO, 0.05)  # the backlog takes it, nobody answers
    fill = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for sock in fill:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(path)
    with pytest.raises(TimeoutError):
        connect(path, HELLO, 0.05)  # the backlog is full
    for sock in [server, *fill]:
        sock.close()


def test_messages_are_small_enough_for_one_buffer() -> None:
    assert len(frame(HELLO)) < MAX_ATTACH_FRAME_BYTES
