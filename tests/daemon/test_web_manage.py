"""The endpoints of `lmcache server` on a real daemon: what scripts ask, and who may not ask."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from kvkeep.daemon.web.access import uid_of, why_not_manage
from kvkeep.daemon.web.lmcache import MAX_DELETED, _hashes
from kvkeep.ipc.client import Client, Namespace
from tests.conftest import Daemon
from tests.daemon.l2_helpers import attach, chain, fs, payload, read, register, row, store, stored
from tests.ipc.conftest import eventually

JSON = {"Content-Type": "application/json"}
CHUNK = 4
Make = Callable[..., Daemon]


def port_of(daemon: Daemon) -> int:
    url = daemon.run_dir / "http.url"
    eventually(url.exists)
    return int(url.read_text().strip().rpartition(":")[2])


def ask(
    daemon: Daemon, method: str, path: str, body: Any = None, headers: dict[str, str] = JSON, host: str = "127.0.0.1"
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(host, port_of(daemon), timeout=60)
    try:
        text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        kind, found = answer.getheader("Content-Type", ""), answer.read().decode()
        return answer.status, json.loads(found) if kind.startswith("application/json") else found
    finally:
        connection.close()


def refused(answer: tuple[int, Any], status: int, says: str) -> None:
    assert answer[0] == status, answer
    assert says in answer[1]["error"]
    assert answer[1]["detail"] == answer[1]["error"]


@pytest.fixture
def web(make_daemon: Make, tmp_path: Path) -> Daemon:
    """With L2, and what was loaded from it stays."""
    return make_daemon("--http-port=0", f"--chunk-size={CHUNK}", fs(tmp_path / "l2"), "--l2-prefetch-policy=retain")


# ---- what is cached ------------------------------------------------------------------------------------------------


def test_clear_drops_l1_and_keeps_l2_as_theirs_does(web: Daemon, seed: int) -> None:
    with attach(web) as kv:
        ns, keys = register(kv), chain(seed, 3)
        store(kv, ns, keys)
        stored(kv, 3)
        assert ask(web, "POST", "/cache/clear", {"tier": "l1"}) == (
            200,
            {"status": "ok", "cleared": {"tier": "l1"}, "dropped": 3},
        )
        assert kv.stats()["l1"]["entries"] == 0
        assert read(kv, ns, keys) == 3  # from L2


def test_clear_of_all_reaches_l2_and_says_what_is_in_use(web: Daemon, seed: int) -> None:
    with attach(web) as kv:
        ns, keys = register(kv), chain(seed, 3)
        store(kv, ns, keys)
        stored(kv, 3)
        with kv.lookup(ns, keys[:1]):
            status, found = ask(web, "POST", "/cache/clear", {"tier": "all"})
        assert (status, found["dropped"], found["in_use"]) == (200, 2, 1)
        assert found["l2"][0]["state"] == "removed"
        assert read(kv, ns, keys) == 1


def test_clear_without_a_body_is_of_l1(web: Daemon) -> None:
    assert ask(web, "POST", "/cache/clear")[1]["cleared"] == {"tier": "l1"}
    assert ask(web, "POST", "/cache/clear", headers={"X-Kvkeep": "1"})[0] == 200


def test_objects_are_listed_by_pages_and_deleted_by_what_the_list_says(web: Daemon, seed: int) -> None:
    with attach(web) as kv:
        ns, keys = register(kv, size=4096, shards=2), chain(seed, 5)
        store(kv, ns, keys, size=4096, shards=2)
        other = kv.register({"model": "other"}, shard_bytes=4096, tenant="team")
        store(kv, other, keys[:1], size=4096)
        stored(kv, 6)
        found: list[dict[str, Any]] = []
        token, pages = "", 0
        while token is not None:
            status, page = ask(web, "GET", f"/cache/objects?page_size=2&page_token={token}")
            assert (status, page["adapter"], page["shared"]) == (200, "fs", False)
            found += page["entries"]
            token, pages = page["next_page_token"], pages + 1
        assert pages > 1
        assert sorted((one["model_name"], one["chunk_hash_hex"], one["kv_rank"]) for one in found) == sorted(
            [("m", key.hex(), rank) for key in keys for rank in (0x02000200, 0x02010201)]
            + [("other", keys[0].hex(), 0x01000100)]
        )
        mine = ask(web, "GET", "/cache/objects?model_name=other&adapter=l2-0")[1]["entries"]
        assert [(one["model_name"], one["cache_salt"]) for one in mine] == [("other", "team")]

        both = [one for one in found if one["chunk_hash_hex"] == keys[4].hex()]
        answer = ask(web, "DELETE", "/cache/objects", {"keys": both, "tier": "all"})
        assert answer == (200, {"deleted": 1, "skipped": 0, "ok": True})
        assert read(kv, ns, keys, size=4096, shards=2) == 4
        with kv.lookup(other, keys[:1]) as still:
            assert still.ready == 1
        unknown = [{"chunk_hash_hex": keys[0].hex(), "model_name": "nobody"}]
        status, answer = ask(web, "DELETE", "/cache/objects", {"keys": unknown, "tier": "l1"})
        assert (status, answer["deleted"], answer["ok"]) == (200, 0, False)


def test_what_makes_no_sense_is_said(web: Daemon) -> None:
    refused(ask(web, "POST", "/cache/clear", {"tier": "l7"}), 400, "'l7' is not one of l1, all")
    refused(ask(web, "POST", "/cache/clear", {"force": True}), 501, "leave out 'force'")
    refused(ask(web, "POST", "/cache/clear", b"[" * 100_000), 400, "not JSON")
    refused(ask(web, "POST", "/cache/clear", [1]), 400, "list")
    refused(ask(web, "GET", "/cache/objects?tier=l1"), 400, "kvkeep ls")
    refused(ask(web, "GET", "/cache/objects?page_size=0"), 400, "from 1 to 5000")
    refused(ask(web, "GET", "/cache/objects?page_token=xyz"), 400, "given out here")
    refused(ask(web, "GET", "/cache/objects?adapter=s3"), 404, "there are l2-0 (fs)")
    refused(ask(web, "DELETE", "/cache/objects", {"keys": []}), 501, "give the tier 'all'")
    for keys in (7, [7], [{}], [{"chunk_hash_hex": "ab", "model_name": "m"}], [{}] * (MAX_DELETED + 1)):
        assert ask(web, "DELETE", "/cache/objects", {"keys": keys, "tier": "l1"})[0] == 400
    refused(ask(web, "GET", "/cache/clear"), 405, "is for POST")
    assert ask(web, "POST", "/cache/clear", headers={**JSON, "Content-Length": str(1 << 40)})[0] == 413
    assert ask(web, "POST", "/cache/clear", headers={**JSON, "Content-Length": "-1"})[0] == 413


def test_without_l2_there_is_nothing_to_list(make_daemon: Make) -> None:
    refused(ask(make_daemon("--http-port=0"), "GET", "/cache/objects"), 503, "--l2-adapter")


# ---- prefetches ----------------------------------------------------------------------------------------------------


def lmcache_namespace(kv: Client, salt: str = "") -> Namespace:
    """As the gateway registers it for workers of LMCache's connector."""
    shape = [2, 1, CHUNK, 512]
    manifest = {"engine": "lmcache-mp", "model": "m", "ranks": 1, "chunk_tokens": CHUNK, "kv_dtype": "bfloat16"}
    return kv.register({**manifest, "shape": shape}, shard_bytes=8192, tenant=salt)


def test_a_prefetch_warms_l1_from_l2(web: Daemon, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 50_000, 5 * CHUNK + 1).tolist()
    packed = _hashes(tokens, CHUNK)
    keys = [packed[at : at + 32] for at in range(0, len(packed), 32)]
    with attach(web) as kv:
        lmcache_namespace(kv)
        ns = lmcache_namespace(kv, "salt")
        kv.store(ns, keys, [payload(key, 8192) for key in keys])
        stored(kv, 5)
        kv.clear(l1_only=True)
        wanted = {"model_name": "m", "world_size": 1, "token_ids": tokens, "cache_salt": "salt"}
        status, told = ask(web, "POST", "/cache/prefetches", wanted)
        assert (status, told["chunks"], told["status"]) == (202, 5, "submitted")
        path = f"/cache/prefetches/{told['request_id']}"
        eventually(lambda: kv.stats()["l1"]["entries"] == 5)
        result: dict[str, Any] = {}

        def done() -> bool:
            result.update(ask(web, "GET", path)[1])
            return bool(result["status"] == "completed")

        eventually(done)
        assert (result["found_keys"], result["total_keys"]) == (5, 5)
        refused(ask(web, "GET", path), 404, "told already")
        with kv.lookup(ns, keys) as found:
            assert found.ready == 5
        eventually(lambda: all(one["name"] != "kvkeep-web" for one in kv.stats()["clients"]))


def test_a_prefetch_of_less_than_a_chunk_or_of_nobody(web: Daemon, make_daemon: Make) -> None:
    wanted = {"model_name": "m", "world_size": 1, "token_ids": [1]}
    assert ask(web, "POST", "/cache/prefetches", wanted) == (202, {"chunks": 0, "status": "noop"})
    refused(ask(web, "POST", "/cache/prefetches", {**wanted, "token_ids": [1] * CHUNK}), 503, "has registered")
    refused(ask(web, "POST", "/cache/prefetches", {**wanted, "token_ids": [-1] * CHUNK}), 400, "token_ids")
    refused(ask(web, "POST", "/cache/prefetches", {**wanted, "token_ids": "abc"}), 400, "'token_ids'")
    refused(ask(web, "POST", "/cache/prefetches", {**wanted, "world_size": None}), 400, "'world_size'")
    refused(ask(web, "POST", "/cache/prefetches", {**wanted, "source_tier": "l1"}), 400, "source_tier")
    refused(ask(make_daemon("--http-port=0"), "POST", "/cache/prefetches", wanted), 501, "policy retain")


# ---- quotas --------------------------------------------------------------------------------------------------------


def test_quotas_are_those_of_the_settings(make_daemon: Make, seed: int) -> None:
    quotas = {"team a/b": 0.5, "": 1}
    daemon = make_daemon("--http-port=0", "--eviction-policy=IsolatedLRU", f"--tenant-quotas={json.dumps(quotas)}")
    with attach(daemon) as kv:
        ns = kv.register({"model": "m"}, shard_bytes=1 << 20, tenant="team a/b")
        store(kv, ns, chain(seed, 2), size=1 << 20)
        used = 2 / 1024
        path = f"/quota/{quote('team a/b', safe='')}"
        eventually(lambda: ask(daemon, "GET", path)[1]["current_usage_gb"] == used)
        assert ask(daemon, "GET", path)[1] == {
            "cache_salt": "team a/b",
            "limit_gb": 0.5,
            "current_usage_gb": used,
            "exists": True,
        }
        assert ask(daemon, "GET", "/quota")[1]["users"] == {
            "team a/b": {"limit_gb": 0.5, "current_usage_gb": used},
            "_default": {"limit_gb": 1.0, "current_usage_gb": 0.0},
        }
        assert ask(daemon, "GET", "/quota/nobody")[1]["exists"] is False
        refused(ask(daemon, "PUT", path, {"limit_gb": 7}), 501, "--tenant-quotas")
        refused(ask(daemon, "DELETE", path, headers={}), 501, "--tenant-quotas")  # as their command line asks
        web = next(p for p in Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split())
        assert b"team a" not in Path(f"/proc/{web}/cmdline").read_bytes()
        assert "team a" not in json.dumps(ask(daemon, "GET", "/status")[1])


# ---- who may ask ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/cache/clear"), ("DELETE", "/cache/objects"), ("POST", "/cache/prefetches")]
)
def test_what_a_browser_sends_for_a_web_site_changes_nothing(web: Daemon, seed: int, method: str, path: str) -> None:
    with attach(web) as kv:
        store(kv, register(kv), chain(seed, 2))
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            headers = {"Content-Type": kind} if kind else {}
            refused(ask(web, method, path, {"tier": "all"}, headers), 415, "Content-Type: application/json")
        for name in ("attacker.example", "attacker.example:80", "10.0.0.1"):
            assert ask(web, method, path, {"tier": "all"}, {**JSON, "Host": name})[0] == 403
        assert ask(web, "OPTIONS", path)[0] == 501  # so a browser does not go on to send what it asked about
        assert kv.stats()["l1"]["entries"] == 2


def test_from_outside_this_host_nothing_is_shown_or_changed(make_daemon: Make, seed: int) -> None:
    daemon = make_daemon("--http-port=0", "--http-host=0.0.0.0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        mine = probe.getsockname()[0]
    if mine.startswith("127."):
        pytest.skip("this host has no other address than loopback")
    with attach(daemon) as kv:
        store(kv, register(kv), chain(seed, 2))
        assert ask(daemon, "GET", "/healthz", host=mine)[0] == 200
        for method, path in (("POST", "/cache/clear"), ("GET", "/cache/objects"), ("GET", "/quota")):
            refused(ask(daemon, method, path, host=mine), 403, "is not this host")
        refused(ask(daemon, "POST", "/cache/clear", headers={**JSON, "Host": mine}), 403, "no loopback name")
        assert kv.stats()["l1"]["entries"] == 2
        assert ask(daemon, "POST", "/cache/clear")[1]["dropped"] == 2


@pytest.mark.parametrize(("listen", "call"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_whose_a_connection_is_is_told_only_while_it_is_open(listen: str, call: str) -> None:
    """The kernel shows uid 0 for some that are closed, so a peer that left must not be taken for root."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server:
        with socket.create_connection((call, server.getsockname()[1])):
            accepted, peer = server.accept()
            here = accepted.getsockname()[:2]
            assert uid_of(peer[:2], here) == os.geteuid()
            assert why_not_manage(peer[:2], here, "localhost", frozenset()) == ""
        assert uid_of(peer[:2], here) is None
        assert "whose connection" in why_not_manage(peer[:2], here, "localhost", frozenset())
        accepted.close()


AS_SOMEBODY = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
request = f"{sys.argv[3]} {sys.argv[4]} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n\\r\\n"
connection = socket.socket()
connection.connect(("127.0.0.1", int(sys.argv[2])))
connection.sendall(request.encode())
print(connection.recv(65536).split()[1].decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_of_this_host_may_not_go_round_the_sockets(make_daemon: Make, seed: int) -> None:
    daemon = make_daemon("--http-port=0", "--admin-uids=12346")

    def as_user(uid: int, method: str, path: str) -> int:
        command = [sys.executable, "-I", "-c", AS_SOMEBODY, str(uid), str(port_of(daemon)), method, path]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    with attach(daemon) as kv:
        store(kv, register(kv), chain(seed, 2))
        assert as_user(12345, "GET", "/status") == 200
        for method, path in (("POST", "/cache/clear"), ("GET", "/cache/objects"), ("GET", "/quota")):
            assert as_user(12345, method, path) == 403
        assert kv.stats()["l1"]["entries"] == 2
        assert as_user(12346, "POST", "/cache/clear") == 200
        assert kv.stats()["l1"]["entries"] == 0


def test_a_body_that_was_not_wanted_is_no_request_of_its_own(web: Daemon) -> None:
    """Refused before the body was read: the connection must end, or what is in the body would be obeyed."""
    inner = b"POST /cache/clear HTTP/1.1\r\nHost: localhost\r\nX-Kvkeep: 1\r\n\r\n"
    outer = b"POST /cache/clear HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
    for head in (outer % len(inner), outer.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")):
        with socket.create_connection(("127.0.0.1", port_of(web)), timeout=30) as one:
            one.sendall(head + inner)
            said = b""
            while piece := one.recv(65536):
                said += piece
        assert said.count(b"HTTP/1.1 ") == 1
        assert said.startswith(b"HTTP/1.1 415 ")
    with socket.create_connection(("127.0.0.1", port_of(web)), timeout=30) as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner)
        said = b""
        while piece := one.recv(65536):
            said += piece
    assert said.count(b"HTTP/1.1 ") == 1


# ---- the rest ------------------------------------------------------------------------------------------------------


def test_status_has_the_fields_that_theirs_has(web: Daemon, seed: int) -> None:
    with attach(web) as kv:
        store(kv, register(kv), chain(seed, 2))
        eventually(lambda: ask(web, "GET", "/status")[1]["storage_manager"]["l1_manager"]["total_object_count"] == 2)
        eventually(lambda: ask(web, "GET", "/status")[1]["is_healthy"])
        found = ask(web, "GET", "/status")[1]
        assert found["chunk_size"] == CHUNK
        manager = found["storage_manager"]["l1_manager"]
        assert manager["memory_total_bytes"] == 64 << 20
        assert manager["memory_usage_ratio"] == manager["memory_used_bytes"] / manager["memory_total_bytes"]
        assert found["storage_manager"]["eviction_controller"] == {"eviction_policy": "LRU"}
        assert [one["type"] for one in found["storage_manager"]["l2_adapters"]] == [row(kv)["type"]] == ["fs"]
        assert ask(web, "GET", "/version")[1] == found["version"]


def test_what_is_not_here_says_what_to_use(web: Daemon) -> None:
    for method, path, says in (
        ("POST", "/run_script", "runs no code"),
        ("GET", "/env", "--print-config"),
        ("GET", "/config", "--print-config"),
        ("POST", "/cache/checksums", "l2 verify"),
        ("POST", "/metrics/reset", "only grow"),
        ("GET", "/periodic-threads/x", "/healthz"),
        ("POST", "/reconfigure/dax/l1/add", "settings"),
    ):
        refused(ask(web, method, path, {}), 501, says)


def test_a_daemon_that_hangs_is_said_within_the_deadline(web: Daemon) -> None:
    import signal

    port_of(web)
    os.kill(web.pid, signal.SIGSTOP)
    try:
        refused(ask(web, "POST", "/cache/clear"), 503, "does not answer")
    finally:
        os.kill(web.pid, signal.SIGCONT)
    eventually(lambda: ask(web, "POST", "/cache/clear")[0] == 200)
