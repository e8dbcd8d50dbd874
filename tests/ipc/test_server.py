"""The RPC socket by itself, in this process: what one peer sends, or does not read, is the others' problem as little
as possible."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvkeep.ipc import messages as m
from kvkeep.ipc.server import DROP_LIMIT, ROUND_S, RpcServer
from tests.faults.fuzz import zmtp_frames, zmtp_peer
from tests.faults.processes import eventually

EPOCH = 7
PING = m.encode(m.Ping(bytes(16), EPOCH))


class Served:
    """A server with a handler that may be slow, or talk a lot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.delay_s = 0.0
        self.document = b""
        self.server = RpcServer(str(path), self._handle, epoch=EPOCH)

    def _handle(self, identity: bytes, request_id: bytes, request: m.AnyRequest) -> m.AnyReply:
        time.sleep(self.delay_s)
        return m.Document(EPOCH, self.document) if self.document else m.Ok(EPOCH)

    def arrived(self, within_s: float = 20.0) -> bool:
        return bool(self.server.socket.poll(int(within_s * 1000)))

    def serve_until_quiet(self) -> None:
        while self.arrived(0.3):
            self.server.service()

    def ask(self, peer: socket.socket, number: int) -> None:
        peer.sendall(zmtp_frames(number.to_bytes(8, "little"), PING))

    def answers(self, peer: socket.socket) -> bool:
        """It is connected, and gets its answer."""
        with contextlib.suppress(OSError):
            self.ask(peer, 1)
            self.serve_until_quiet()
            peer.settimeout(0.5)
            return bool(peer.recv(4096))
        return False


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "rpc.sock")
    yield served
    served.server.close()


def reply_of(peer: socket.socket) -> m.AnyReply:
    """The body of the first reply, which is short: [more, 8] id [0, length] body."""
    peer.settimeout(10)
    heard = peer.recv(65536)
    return m.decode_reply(heard[12:] if heard[10] == 0 else heard[19:])


def test_a_message_of_very_many_frames_is_refused_once_and_dropped_a_bounded_piece_a_round(served: Served) -> None:
    count = 20 * DROP_LIMIT
    with zmtp_peer(served.path) as peer, zmtp_peer(served.path) as other:
        peer.sendall(b"\x01\x08" + bytes(8) + b"\x01\x00" * (count - 2) + b"\x00\x00")
        assert served.arrived(), "ROUTER tells of a message when all of it has come"
        served.ask(other, 5)
        rounds = 0
        while served.arrived(0.3):
            served.server.service()
            rounds += 1
        assert rounds >= count // DROP_LIMIT
        refused = reply_of(peer)
        assert isinstance(refused, m.Error)
        assert "this had 2 and more and an id of 8 bytes" in refused.message
        assert isinstance(reply_of(other), m.Ok)
        assert (served.server.requests, served.server.malformed) == (2, 1)
        assert served.answers(peer), "it may do better"


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
def test_a_message_with_a_wrong_number_of_frames_gets_one_error(served: Served, frames: int) -> None:
    with zmtp_peer(served.path) as peer:
        peer.sendall(zmtp_frames(*[bytes(8)] * frames))
        assert served.arrived()
        served.serve_until_quiet()
        assert isinstance(reply_of(peer), m.Error)
        assert (served.server.requests, served.server.malformed) == (1, 1)


def test_requests_that_take_long_leave_the_other_sockets_their_turn(served: Served) -> None:
    served.delay_s = 1.2 * ROUND_S
    with zmtp_peer(served.path) as peer:
        for number in range(5):
            served.ask(peer, number)
        for number in range(5):
            assert served.arrived()
            assert served.server.service() or number == 4
            assert served.server.requests == number + 1


def test_a_peer_that_does_not_read_is_busy_and_can_be_cut_while_others_stay(served: Served) -> None:
    served.document = b"x" * 100_000
    with zmtp_peer(served.path) as slow, zmtp_peer(served.path) as good:
        for number in range(50):
            served.ask(slow, number)
        served.serve_until_quiet()
        served.document = b""
        assert served.answers(good)
        served.server.note_busy()
        assert served.server.cut(only_busy=True) == [os.getpid()]
        assert served.answers(good)
        assert not served.answers(slow)
        served.server.note_busy()
        assert served.server.cut(only_busy=True) == []


def test_who_was_cut_may_connect_again_and_nothing_of_before_is_left(served: Served) -> None:
    with zmtp_peer(served.path) as one, zmtp_peer(served.path) as two:
        assert served.answers(one)
        one.sendall(b"\x01\x08" + bytes(8) + b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20))
        assert served.answers(two)
        assert served.server.cut(only_busy=False) == [os.getpid()] * 2
        for peer in (one, two):
            assert not served.answers(peer)
    eventually(lambda: served.server.cut(only_busy=False) == [], say="their ends were not noticed")
    with zmtp_peer(served.path) as again:
        assert served.answers(again)
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    try:
        dealer.linger = 0
        dealer.connect(f"ipc://{served.path}")

        def answered() -> bool:
            dealer.send_multipart((bytes(8), PING))  # may be lost with the connection
            served.serve_until_quiet()
            return bool(dealer.poll(500)) and isinstance(m.decode_reply(dealer.recv_multipart()[1]), m.Ok)

        for _ in range(2):  # libzmq's own DEALER connects again by itself
            eventually(answered)
            served.server.cut(only_busy=False)
    finally:
        dealer.close(0)


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(served: Served) -> None:
    peer = zmtp_peer(served.path)
    assert served.answers(peer)
    served.server.connected()
    (fd,) = served.server._connections
    which = served.server._connections[fd]
    peer.close()

    def forgotten() -> bool:
        served.server.connected()
        return not served.server._connections

    eventually(forgotten)
    ours, theirs = socket.socketpair()
    eventfd = os.eventfd(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        served.server._connections |= {ours.fileno(): which, eventfd: which, 9999: which}
        served.server.note_busy()
        assert served.server.cut(only_busy=False) == []
        ours.sendall(b"still here")
        assert theirs.recv(100) == b"still here"
        assert len(os.listdir("/proc/self/fd")) == descriptors
    os.close(eventfd)
