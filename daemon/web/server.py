"""HTTP for people, Prometheus and orchestrators.  Read only; nothing a request holds is acted upon.

    /          the live page            /status    the statistics document
    /metrics   Prometheus text          /healthz   200 while the control process moves
                                        /readyz    200, or 503 with the reasons
    /healthcheck  what /healthz says, in the words of `lmcache server`

Bound to loopback it answers only requests that name a loopback host, so that a web site open in a browser on this
machine cannot read it through a name of its own (DNS rebinding).  At most `MAX_CONNECTIONS` are served at once, each
with a time limit; one more is closed at once.
"""

from __future__ import annotations

import argparse
import http.server
import ipaddress
import json
import logging
import os
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from kvkeep.daemon import logs
from kvkeep.daemon.web import metrics
from kvkeep.daemon.web.source import STALE_AFTER_S, StatsSource, age_s, problems

MAX_CONNECTIONS = 64
IDLE_CONNECTION_S = 15
LOOP_S = 5.0  # how often the main loop comes round without a request, and beats

log = logging.getLogger("kvkeep.web")

_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:",
    ),
)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "kvkeep"
    sys_version = ""
    timeout = IDLE_CONNECTION_S
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body leave in one write
    server: Server

    def do_GET(self) -> None:
        if not self.server.may_ask(self.headers.get("Host", "")):
            self._answer(403, "text/plain", "this server is for requests to a loopback address\n")
            return
        path = self.path.partition("?")[0]
        answer = _ROUTES.get(path)
        if answer is None:
            self._answer(404, "text/plain", f"there are {', '.join(_ROUTES)}\n")
            return
        self._answer(*answer(self.server))

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for header in _HEADERS:
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, source: StatsSource, beat: Callable[[], None]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.source = source
        self._beat = beat
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self._loopback = ipaddress.ip_address(str(self.server_address[0])).is_loopback

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask DNS for our own name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def may_ask(self, host_header: str) -> bool:
        if not self._loopback:
            return True
        host = host_header.strip()
        host = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host.lower() == "localhost"

    def service_actions(self) -> None:
        self._beat()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        problem = sys.exc_info()[1]
        if not isinstance(problem, OSError):  # a peer that went away is no news
            log.exception("a request failed")


# ---- answers -------------------------------------------------------------------------------------------------------

_Answer = tuple[int, str, str]


def _page(server: Server) -> _Answer:
    return 200, "text/html", resources.files("kvkeep.daemon.web").joinpath("index.html").read_text(encoding="utf-8")


def _status(server: Server) -> _Answer:
    document = server.source.document()
    if not document:
        return 503, "application/json", json.dumps({"health": "degraded", "reasons": problems(document)})
    found = problems(document)
    if found:
        document = {**document, "health": "degraded", "reasons": found}
    return 200, "application/json", json.dumps(document)


def _metrics(server: Server) -> _Answer:
    return 200, "text/plain; version=0.0.4", metrics.render(server.source.document())


def _healthz(server: Server) -> _Answer:
    document = server.source.document()
    if not document or age_s(document) > STALE_AFTER_S:
        return 503, "text/plain", "\n".join(problems(document)) + "\n"
    return 200, "text/plain", "ok\n"


def _healthcheck(server: Server) -> _Answer:
    status, _, body = _healthz(server)
    said = {"status": "healthy"} if status == 200 else {"status": "unhealthy", "reason": body.strip()}
    return status, "application/json", json.dumps(said)


def _readyz(server: Server) -> _Answer:
    found = problems(server.source.document())
    return (503, "text/plain", "\n".join(found) + "\n") if found else (200, "text/plain", "ok\n")


_ROUTES: dict[str, Callable[[Server], _Answer]] = {
    "/": _page,
    "/metrics": _metrics,
    "/status": _status,
    "/healthz": _healthz,
    "/readyz": _readyz,
    "/healthcheck": _healthcheck,
}

# ---- process -------------------------------------------------------------------------------------------------------


def serve(argv: Sequence[str], beat: Callable[[], None]) -> int:
    parser = argparse.ArgumentParser(prog="kvkeep-web", description="Serves a kvkeep daemon's statistics over HTTP.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--stats-fd", type=int, help="inherited descriptor of the meta segment")
    where.add_argument("--meta-path", help="path of the meta segment, /dev/shm/kvkeep-NAME-meta")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 = any free one")
    parser.add_argument("--url-file", default="", help="where to write the address that is served")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    args = parser.parse_args(argv)
    logs.setup(args.log_level, args.log_format)

    fd = os.open(args.meta_path, os.O_RDONLY | os.O_CLOEXEC) if args.meta_path else args.stats_fd
    source = StatsSource(fd)
    try:
        server = Server(args.host, args.port, source, beat)
    except OSError as problem:
        log.error("cannot listen on %s port %d (%s): change --http-port", args.host, args.port, problem.strerror)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # it holds nothing that must be put in order
    if args.url_file:
        _write(args.url_file, server.url + "\n")
    log.info("metrics, status and the live page are at %s", server.url)
    server.serve_forever(poll_interval=LOOP_S)
    return 0


def _write(path: str, text: str) -> None:
    """Whole or not at all."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="ascii") as file:
        file.write(text)
    os.replace(temporary, path)
