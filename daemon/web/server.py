"""HTTP for people, Prometheus, orchestrators, and scripts that were written for `lmcache server`.

    /          the live page            /status    the statistics document
    /metrics   Prometheus text          /healthz   200 while the control process moves
    /version   of kvkeep                /readyz    200, or 503 with the reasons
    /healthcheck  what /healthz says, in the words of `lmcache server`
    /cache/… and /quota…                see lmcache.py: not for every visitor (access.py), asked of control (calls.py)

Everything but the last line is read only.  Bound to loopback it answers only requests that name a loopback host, so
that a web site open in a browser on this machine cannot read it through a name of its own (DNS rebinding).  At most
`MAX_CONNECTIONS` are served at once, each with a time limit; one more is closed at once.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

from kvkeep.daemon import logs
from kvkeep.daemon.web import QUOTAS_VARIABLE, access, lmcache, metrics
from kvkeep.daemon.web.calls import Refused, Settings
from kvkeep.daemon.web.source import STALE_AFTER_S, StatsSource, age_s, problems

MAX_CONNECTIONS = 64
IDLE_CONNECTION_S = 15
MAX_BODY = 32 << 20  # a million tokens are less
MAX_IGNORED = 1 << 16  # of a body that is not wanted
DRAIN_S = 0.5
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

    _unread = False  # there may be a body that nobody has read

    def do_GET(self) -> None:
        self._unread = self._length() > 0 or self.headers.get("Transfer-Encoding") is not None
        host = self.headers.get("Host", "")
        path, _, query = self.path.partition("?")
        if not self.server.may_ask(host):
            self._refuse((403, "text/plain", "this server is for requests to a loopback address\n"))
        elif methods := self.server.endpoints.methods(path):
            self._manage(path, query, host, methods)
        elif instead := lmcache.what_instead(path):
            self._refuse(_problem(Refused(501, f"{path} is not here: {instead}")))
        elif path not in _ROUTES:
            self._refuse((404, "text/plain", f"there are {', '.join(_ROUTES)}\n"))
        elif self.command not in ("GET", "HEAD"):
            self._refuse((405, "text/plain", f"{path} can only be read\n"), Allow="GET, HEAD")
        else:
            self._answer(*_ROUTES[path](self.server))

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _manage(self, path: str, query: str, host: str, methods: tuple[str, ...]) -> None:
        """One of the endpoints that ask control; nothing of the body is read before it is known who sends it."""
        try:
            self._check(path, host, methods)
            body, bytes_of = self._body(), self.server.source.bytes_by_tenant
            request = lmcache.Request(self.command, path, dict(parse_qsl(query)), body, bytes_of)
            status, found = self.server.endpoints.answer(request)
        except Refused as refused:
            allow = {"Allow": ", ".join(methods)} if refused.status == 405 else {}
            self._refuse(_problem(refused), **allow)
            return
        if self.command != "GET":
            log.info("%s %s was done: %s", self.command, path, {k: v for k, v in found.items() if k != "request_id"})
        self._answer(status, "application/json", json.dumps(found))

    def _check(self, path: str, host: str, methods: tuple[str, ...]) -> None:
        """Raises Refused."""
        if self.command not in methods:
            raise Refused(405, f"{path} is for {', '.join(methods)}")
        here, peer = self.connection.getsockname()[:2], self.client_address[:2]
        if problem := access.why_not_manage(peer, here, host, self.server.settings.admin_uids):
            raise Refused(403, problem)
        changes = self.command != "GET" and not path.startswith("/quota/")  # which is told what to set instead
        if changes and (problem := access.why_not_change(self.headers)):
            raise Refused(415, problem)

    def _body(self) -> bytes:
        """Raises Refused."""
        if self.headers.get("Transfer-Encoding") is not None:
            raise Refused(411, "send the body in one piece, with its Content-Length")
        length = self._length()
        if length > MAX_BODY:
            raise Refused(413, f"a body of {length} bytes; at most {MAX_BODY} are read")
        body = self.rfile.read(length)
        if len(body) < length:
            raise Refused(400, f"the body ends after {len(body)} of {length} bytes")
        self._unread = False
        return body

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "0").strip()
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else MAX_BODY + 1

    def _refuse(self, answer: _Answer, **headers: str) -> None:
        """Before the body was read.  What has come of it is taken off the socket, so that the answer arrives."""
        self._answer(*answer, headers)
        if self._unread:
            self.wfile.flush()
            self.connection.settimeout(DRAIN_S)
            with contextlib.suppress(OSError):
                self.rfile.read(min(self._length(), MAX_IGNORED))

    def _answer(self, status: int, kind: str, body: str, headers: Mapping[str, str] | None = None) -> None:
        data = body.encode()
        more = dict(headers or {})
        if self._unread:
            more["Connection"] = "close"  # what follows is a body, and must not be taken for a request
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for header in (*_HEADERS, *more.items()):
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, source: StatsSource, beat: Callable[[], None], settings: Settings) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.source = source
        self.settings = settings
        self.endpoints = lmcache.Endpoints(settings)
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
        return not self._loopback or access.is_loopback_name(host_header)

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


def _problem(problem: Refused) -> _Answer:
    """`lmcache server` says "detail" in some places and "error" in others, and its command line reads "error"."""
    return problem.status, "application/json", json.dumps({"error": str(problem), "detail": str(problem)})


def _page(server: Server) -> _Answer:
    return 200, "text/html", resources.files("kvkeep.daemon.web").joinpath("index.html").read_text(encoding="utf-8")


def _status(server: Server) -> _Answer:
    document = server.source.document()
    if not document:
        told = {"health": "degraded", "reasons": problems(document), "is_healthy": False}
        return 503, "application/json", json.dumps(told)
    found = problems(document)
    if found:
        document = {**document, "health": "degraded", "reasons": found}
    theirs = lmcache.status_of(document, server.settings, healthy=not found)
    return 200, "application/json", json.dumps({**document, **theirs})


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


def _version(server: Server) -> _Answer:
    return 200, "application/json", json.dumps(str(server.source.document().get("version", "")))


_ROUTES: dict[str, Callable[[Server], _Answer]] = {
    "/": _page,
    "/metrics": _metrics,
    "/status": _status,
    "/healthz": _healthz,
    "/readyz": _readyz,
    "/healthcheck": _healthcheck,
    "/version": _version,
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
    parser.add_argument("--run-dir", default="", help="of the daemon to ask; empty = there is none")
    parser.add_argument("--chunk-size", type=int, default=0)
    parser.add_argument("--eviction-policy", default="")
    parser.add_argument("--l2-prefetch-policy", default="")
    parser.add_argument("--admin-uids", type=json.loads, default=[])
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    args = parser.parse_args(argv)
    logs.setup(args.log_level, args.log_format)

    fd = os.open(args.meta_path, os.O_RDONLY | os.O_CLOEXEC) if args.meta_path else args.stats_fd
    source = StatsSource(fd)
    settings = Settings(
        run_dir=args.run_dir,
        chunk_size=args.chunk_size,
        eviction_policy=args.eviction_policy,
        prefetch_policy=args.l2_prefetch_policy,
        quotas=json.loads(os.environ.get(QUOTAS_VARIABLE, "{}")),
        admin_uids=frozenset(args.admin_uids),
    )
    try:
        server = Server(args.host, args.port, source, beat, settings)
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
