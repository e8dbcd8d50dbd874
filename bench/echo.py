"""The reference of `bench control`: a bare ZeroMQ ROUTER in a process of its own that answers at once.

It gets the bytes of a real request and returns as many bytes as the real reply has.  Nothing is decoded, looked up or
encoded, so what it takes is what the transport takes, in the same language on the same machine at the same moment.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from types import TracebackType

import zmq

_ID = b"\0" * 8
_END = b"end"


def _serve(endpoint: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    replies: dict[int, bytes] = {}
    while True:
        frames = socket.recv_multipart()
        if len(frames) == 3:
            identity, request_id, body = frames
            socket.send_multipart((identity, request_id, replies[len(body)]))
        elif frames[1] == _END:
            return
        else:  # [identity, _, length of the request, the reply to it]
            replies[int.from_bytes(frames[2], "little")] = frames[3]


class Echo:
    """Context manager.  `call` is one round trip; its seconds are the result."""

    def __init__(self, folder: str) -> None:
        self._endpoint = f"ipc://{folder}/echo.sock"
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(self._endpoint,), daemon=True)

    def __enter__(self) -> Echo:
        self._process.start()
        self._socket.connect(self._endpoint)
        return self

    def prepare(self, request: bytes, reply: bytes) -> None:
        """From now on requests of this length get this reply.  The first one waits until the other side is up."""
        self._socket.send_multipart((_ID, len(request).to_bytes(8, "little"), reply))
        self.call(request)

    def call(self, request: bytes) -> float:
        begin = time.perf_counter()
        self._socket.send_multipart((_ID, request))
        self._socket.recv_multipart()
        return time.perf_counter() - begin

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(0)
        self._context.term()
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(5)
