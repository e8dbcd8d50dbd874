"""The web process: always the whole set of series, honest about trouble, and harmless."""

from __future__ import annotations

import http.client
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.daemon.web.metrics import COUNTERS, render
from kvkeep.shm.layout import ENTRY_OFFSET, NAMESPACE_OFFSET, SLAB_OFFSET, STATS_BYTES, STATS_OFFSET
from kvkeep.shm.namespaces import NamespaceTable
from kvkeep.shm.stats import write_stats

DOCUMENT: dict[str, Any] = {
    "name": "here",
    "version": "0.1.0",
    "pid": 7,
    "epoch": 3,
    "uptime_s": 12.5,
    "health": "ok",
    "reasons": [],
    "l1": {"bytes_total": 1 << 30, "bytes_ready": 1 << 30, "bytes_used": 1 << 20, "entries": 5, "references": 2},
    "clients": [{"pid": 9, "uid": 0, "name": "<b>engine</b>", "references": 2, "reserved_bytes": 0, "idle_s": 1.0}],
    "clients_total": 1,
    "namespaces": [{"id": 1, "digest": "ab" * 32, "entries": 5, "bytes": 1 << 20, "model": 'a"b\\c\n'}],
    "counters": {"lookups": 4, "something_new": 6},
}


class Web:
    """A web process of its own on a meta segment of the test's making."""

    def __init__(self, folder: Path) -> None:
        path, url = folder / "meta", folder / "http.url"
        path.write_bytes(b"\0" * ENTRY_OFFSET)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ENTRY_OFFSET)
        command = [sys.executable, "-m", "kvkeep.daemon.web", "--meta-path", str(path), "--url-file", str(url)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 30
        while not url.exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.02)
        self.port = int(url.read_text().strip().rpartition(":")[2])

    def publish(self, document: dict[str, Any]) -> None:
        page = np.frombuffer(self._map, dtype=np.uint8)[STATS_OFFSET : STATS_OFFSET + STATS_BYTES]
        assert write_stats(page, json.dumps({**document, "monotonic_s": time.monotonic()} | document).encode())
        time.sleep(0.15)  # the web process looks at the page at most ten times a second

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    server = Web(tmp_path)
    yield server
    server.close()


def values(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found[series] = float(value)
    return found


def test_status_metrics_and_page_show_what_the_daemon_wrote(web):
    web.publish(DOCUMENT)
    status, body = web.get("/status")
    assert status == 200
    assert json.loads(body)["l1"]["entries"] == 5
    status, body = web.get("/metrics")
    series = values(body)
    assert status == 200
    assert series["kvkeep_l1_used_bytes"] == 1 << 20
    assert series["kvkeep_lookups_total"] == 4
    assert series["kvkeep_something_new_total"] == 6
    assert series["kvkeep_clients"] == 1
    status, body = web.get("/")
    assert status == 200
    assert "<title>kvkeep</title>" in body


def test_every_series_is_there_at_zero_before_the_first_statistics(web):
    series = values(web.get("/metrics")[1])
    for counter in COUNTERS:
        assert series[f"kvkeep_{counter}_total"] == 0
    assert series["kvkeep_healthy"] == 0
    assert set(values(render(DOCUMENT))) >= {s for s in series if "info" not in s}


def test_metrics_are_well_formed_whatever_a_client_calls_itself():
    for line in render(DOCUMENT).splitlines():
        assert re.fullmatch(
            r'# (HELP|TYPE) kvkeep_\w+ .+|kvkeep_\w+(\{(\w+="([^"\\\n]|\\["\\n])*",?)*\})? [-+.\de]+', line
        ), line
    for line in render({"l1": None, "clients": 3, "namespaces": [5], "counters": {"a": "b"}}).splitlines():
        assert line.startswith(("#", "kvkeep_"))


def test_namespaces_are_shown_with_the_model_that_their_manifest_names(web):
    table = NamespaceTable(np.frombuffer(web._map, dtype=np.uint8)[NAMESPACE_OFFSET:SLAB_OFFSET])
    known = table.add(2, b'{"model":"org/model"}', 1, 4096)
    spaces = [{"id": 2, "digest": known.digest.hex()}, {"id": 3, "digest": "00" * 32}, {"id": 9999, "digest": 5}]
    web.publish({**DOCUMENT, "namespaces": spaces})
    assert [n["model"] for n in json.loads(web.get("/status")[1])["namespaces"]] == ["org/model", "", ""]
    assert f'digest="{known.digest.hex()[:16]}",model="org/model"' in web.get("/metrics")[1]


def test_readiness_follows_health_and_says_why(web):
    assert web.get("/readyz")[0] == 503
    web.publish(DOCUMENT)
    assert web.get("/readyz") == (200, "ok\n")
    assert web.get("/healthz") == (200, "ok\n")
    assert web.get("/healthcheck") == (200, '{"status": "healthy"}')
    web.publish({**DOCUMENT, "health": "degraded", "reasons": ["web: killed by signal 9"]})
    assert web.get("/readyz") == (503, "web: killed by signal 9\n")
    assert web.get("/healthz")[0] == 200


def test_a_control_process_that_no_longer_writes_is_noticed(web):
    web.publish({**DOCUMENT, "monotonic_s": time.monotonic() - 60})
    status, body = web.get("/readyz")
    assert status == 503
    assert "60 s" in body
    assert web.get("/healthz")[0] == 503
    assert '"status": "unhealthy"' in web.get("/healthcheck")[1]
    assert json.loads(web.get("/status")[1])["health"] == "degraded"


def test_a_page_of_rubbish_is_no_statistics(web):
    page = np.frombuffer(web._map, dtype=np.uint8)[STATS_OFFSET : STATS_OFFSET + STATS_BYTES]
    for rubbish in (b"\xff\xfe{", b"[1, 2]", b"{" * 1000, b""):
        write_stats(page, rubbish)
        time.sleep(0.15)
        assert web.get("/metrics")[0] == 200
        assert web.get("/readyz")[0] == 503


def test_it_listens_on_loopback_only(web):
    sockets = Path(f"/proc/{web.process.pid}/net/tcp").read_text().splitlines()[1:]
    ours = [line.split()[1] for line in sockets if line.split()[1].endswith(f":{web.port:04X}")]
    assert ours
    assert all(address.startswith("0100007F:") for address in ours)


def test_a_web_site_cannot_read_it_under_a_name_of_its_own(web):
    web.publish(DOCUMENT)
    assert web.get("/status", Host="attacker.example:8080")[0] == 403
    assert web.get("/status", Host="attacker.example")[0] == 403
    for name in ("localhost", f"localhost:{web.port}", f"127.0.0.1:{web.port}", "[::1]:80"):
        assert web.get("/status", Host=name)[0] == 200


def test_without_a_daemon_it_only_reads(web):
    for method in ("POST", "PUT", "DELETE"):
        assert web.get("/status", method=method)[0] == 405
    assert web.get("/status", method="PATCH")[0] == 501
    status, body = web.get("/cache/clear", "POST", **{"Content-Type": "application/json"})
    assert status == 503
    assert "without a daemon" in body
    assert web.get("/nowhere")[0] == 404
    assert web.get("/../../etc/passwd")[0] == 404
    assert web.get("/status?x=1")[0] == 503  # nothing written yet, and that is said
    assert web.get("/healthz", method="HEAD")[1] == ""


def test_slow_visitors_do_not_keep_others_out(web):
    web.publish(DOCUMENT)
    slow = [socket.create_connection(("127.0.0.1", web.port)) for _ in range(200)]
    for one in slow:
        one.sendall(b"GET /status HTTP/1.1\r\nHost: 127")
    time.sleep(0.5)
    threads = len(os.listdir(f"/proc/{web.process.pid}/task"))
    assert threads <= 64 + 8
    for one in slow:
        one.close()
    end = time.monotonic() + 30
    while True:
        try:
            assert web.get("/healthz")[0] == 200
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_request_to_stop_is_obeyed(web):
    web.process.send_signal(signal.SIGTERM)
    assert web.process.wait(timeout=30) == 0


def test_a_port_in_use_is_one_clear_line(tmp_path):
    path = tmp_path / "meta"
    path.write_bytes(b"\0" * ENTRY_OFFSET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvkeep.daemon.web", "--meta-path", str(path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "change --http-port" in done.stderr


def test_the_page_loads_nothing_from_elsewhere_and_never_writes_a_name_as_html():
    from importlib import resources

    page = resources.files("kvkeep.daemon.web").joinpath("index.html").read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    assert "innerHTML" not in page
    assert "http://" not in page
    assert "https://" not in page
