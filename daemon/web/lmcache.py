"""The HTTP endpoints of `lmcache server` that scripts use, under their paths and with their field names.

    POST   /cache/clear            {"tier": "l1" | "all"}
    GET    /cache/objects          ?adapter= &model_name= &page_size= &page_token=
    DELETE /cache/objects          {"keys": [{"chunk_hash_hex", "model_name", "cache_salt"}], "tier": "l1" | "all"}
    POST   /cache/prefetches       {"model_name", "world_size", "token_ids", "cache_salt"}
    GET    /cache/prefetches/ID
    GET    /quota, /quota/TENANT

Each is a pure function of the request and of what control answers; who may ask is `access`, how control is asked is
`calls`.  A fact that there is none of here is left out rather than made up; more facts of ours stand beside theirs.
What they have and we have not is answered with one sentence: it says what to use instead.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from kvkeep.daemon.web.calls import Calls, Prefetches, Refused, Settings, Wanted

MAX_PAGE_SIZE = 5000  # theirs, as are the two below; a page of ours may be shorter than was asked for
MAX_DELETED = 10_000
MAX_TOKENS = 1_000_000
_PAGE_SIZE = 500
_HASH_BYTES = 32
_NOBODY = "_default"  # how a path says the tenant ""
_GIB = 1 << 30

log = logging.getLogger("kvkeep.web")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    body: bytes
    bytes_of: Callable[[], dict[str, int]]  # in L1, by tenant

    def json(self) -> dict[str, Any]:
        """An empty body is an empty object.  Raises Refused."""
        try:
            found = json.loads(self.body or b"{}")
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(found, dict):
            raise Refused(400, f"the body is a {type(found).__name__}: give a JSON object")
        return found


Answer = tuple[int, dict[str, Any]]


class Endpoints:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._calls = Calls(settings)
        self._prefetches = Prefetches(settings)
        self._handlers: dict[tuple[str, str], Callable[[Request, str], Answer]] = {
            ("POST", "/cache/clear"): self._clear,
            ("GET", "/cache/objects"): self._objects,
            ("DELETE", "/cache/objects"): self._delete,
            ("POST", "/cache/prefetches"): self._prefetch,
            ("GET", "/cache/prefetches/"): self._prefetch_status,
            ("GET", "/quota"): self._quotas,
            ("GET", "/quota/"): self._quota,
            ("PUT", "/quota/"): self._set_quota,
            ("DELETE", "/quota/"): self._set_quota,
        }

    def methods(self, path: str) -> tuple[str, ...]:
        """What may be done there; empty = the path is none of these."""
        return tuple(method for method, known in self._handlers if known == _pattern(path))

    def answer(self, request: Request) -> Answer:
        """Raises Refused."""
        pattern = _pattern(request.path)
        try:
            return self._handlers[request.method, pattern](request, unquote(request.path[len(pattern) :]))
        except Refused:
            raise
        except Exception:
            log.exception("%s %s failed", request.method, pattern)
            raise Refused(500, "a bug in kvkeep: its log has the traceback") from None

    # ---- what is cached ----------------------------------------------------------------------------------------------

    def _clear(self, request: Request, _: str) -> Answer:
        body = request.json()
        tier = _one_of(body, "tier", ("l1", "all"), "l1")
        _no_force(body)
        with self._calls.client() as client:
            dropped = client.clear(l1_only=tier == "l1")
        return 200, {"status": "ok", "cleared": {"tier": tier}, "dropped": int(dropped), **_left(dropped, tier)}

    def _objects(self, request: Request, _: str) -> Answer:
        if (tier := request.query.get("tier", "l2")) != "l2":
            raise Refused(400, f"tier {tier!r} is not listed here, only 'l2': `kvkeep ls NAMESPACE` lists L1")
        size = _whole(request.query.get("page_size", str(_PAGE_SIZE)), "page_size", 1, MAX_PAGE_SIZE)
        token, model = request.query.get("page_token", ""), request.query.get("model_name")
        try:
            bytes.fromhex(token)
        except ValueError:
            raise Refused(400, f"page_token {token!r} is none that was given out here") from None
        with self._calls.client() as client:
            row = _adapter(client.stats()["l2"], request.query.get("adapter"))
            step = client.l2(row["name"], "list", cursor=token, limit=size)
            if step.get("problem"):
                raise Refused(503, f"L2 adapter {row['name']} cannot be listed now: {step['problem']}")
            manifests = {one["digest"]: one["manifest"] for one in client.list()["namespaces"]}
            for digest in {one["namespace"] for one in step["rows"]} - set(manifests):
                found = client.l2(row["name"], "manifest", namespace=bytes.fromhex(digest)).get("manifest")
                manifests[digest] = found if isinstance(found, dict) else {}
        entries = [_entry(one, manifests[one["namespace"]]) for one in step["rows"]]
        return 200, {
            "adapter": row["type"],
            "shared": False,
            "entries": [one for one in entries if model in (None, one["model_name"])],
            "next_page_token": step["cursor"] or None,
        }

    def _delete(self, request: Request, _: str) -> Answer:
        body = request.json()
        tier = _one_of(body, "tier", ("l1", "all", "l2"), "l2")
        if tier == "l2":
            raise Refused(501, "what is deleted from L2 alone would be stored again from L1: give the tier 'all'")
        _no_force(body)
        keys = body.get("keys")
        if not isinstance(keys, list) or len(keys) > MAX_DELETED:
            raise Refused(400, f"'keys' must be a list of at most {MAX_DELETED} objects")
        chains = [_key(at, key) for at, key in enumerate(keys)]
        deleted, skipped, unknown, left = 0, 0, 0, list[str]()
        with self._calls.client() as client:
            spaces = client.list()["namespaces"]
            chunks: dict[int, dict[bytes, None]] = defaultdict(dict)  # by place in the list
            for chunk, about in chains:
                mine = [place for place, one in enumerate(spaces) if about == _about(one["manifest"])]
                unknown += not mine
                for place in mine:
                    chunks[place][chunk] = None
            for place, keys_there in chunks.items():
                space = spaces[place]
                known = client.register(
                    space["manifest"], shard_bytes=int(space["shard_bytes"]), shards=int(space["shards"])
                )
                dropped = client.delete(known, list(keys_there), l1_only=tier == "l1")
                deleted, skipped = deleted + int(dropped), skipped + dropped.in_use
                left += [str(one["name"]) for one in dropped.l2 if one["state"] != "removed"]
        problems = [f"{unknown} keys are of a model or salt that is not registered now"] if unknown else []
        problems += (
            [f"{', '.join(sorted(set(left)))} will remove them later: they are not served any more"] if left else []
        )
        told: dict[str, Any] = {"deleted": deleted} | ({"skipped": skipped} if tier == "all" else {})
        return 200, told | {"ok": not problems} | ({"error": "; ".join(problems)} if problems else {})

    # ---- prefetches --------------------------------------------------------------------------------------------------

    def _prefetch(self, request: Request, _: str) -> Answer:
        body = request.json()
        tokens = body.get("token_ids")
        if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS:
            raise Refused(400, f"'token_ids' must be a list of at most {MAX_TOKENS} numbers")
        model, salt, ranks = body.get("model_name"), body.get("cache_salt", ""), body.get("world_size")
        if not isinstance(model, str) or not isinstance(salt, str) or not isinstance(ranks, int):
            raise Refused(400, "'model_name' and 'cache_salt' must be text, 'world_size' a number")
        _one_of(body, "source_tier", ("l2",), "l2")
        _one_of(body, "target_tier", ("l1",), "l1")
        if self._settings.prefetch_policy == "default":
            raise Refused(
                501,
                "with --l2-prefetch-policy default what is loaded leaves L1 with its first reader, so nothing can be "
                "warmed: use --l2-prefetch-policy retain",
            )
        hashes = _hashes(tokens, self._settings.chunk_size)
        if not hashes:
            return 202, {"chunks": 0, "status": "noop"}
        with self._calls.client() as client:
            if not client.stats()["l2"]:
                raise Refused(503, "no L2 adapters are configured: there is nothing to load from")
            spaces = client.list()["namespaces"]
        mine = [one for one in spaces if _serves(one["manifest"], model, ranks, self._settings.chunk_size)]
        if not mine:
            raise Refused(
                503,
                f"no worker of LMCache's connector has registered model_name={model!r} world_size={ranks} here; "
                "engines on kvkeep's own connector load when a request comes",
            )
        wanted = {_plain(one["manifest"]): _wanted(one, salt, hashes) for one in mine}
        chunks = len(hashes) // _HASH_BYTES
        number = self._prefetches.submit(list(wanted.values()), chunks * sum(one.shards for one in wanted.values()))
        return 202, {"request_id": number, "chunks": chunks, "status": "submitted"}

    def _prefetch_status(self, request: Request, number: str) -> Answer:
        job = self._prefetches.result(number)
        if job is None:
            raise Refused(404, f"there is no prefetch {number[:64]!r}: it was told already, or never submitted here")
        if not job.done_at:
            return 200, {"request_id": number, "status": "pending"}
        told = {"request_id": number, "status": "completed", "found_keys": job.found, "total_keys": job.total}
        return 200, told | ({"error": job.problem} if job.problem else {})

    # ---- quotas ------------------------------------------------------------------------------------------------------

    def _quotas(self, request: Request, _: str) -> Answer:
        used = request.bytes_of()
        quotas = self._settings.quotas
        users = {
            tenant or _NOBODY: {"limit_gb": float(limit), "current_usage_gb": used.get(tenant, 0) / _GIB}
            for tenant, limit in quotas.items()
        }
        return 200, {"users": users}

    def _quota(self, request: Request, path: str) -> Answer:
        tenant = "" if path == _NOBODY else path
        limit = self._settings.quotas.get(tenant)
        return 200, {
            "cache_salt": tenant or _NOBODY,
            "limit_gb": None if limit is None else float(limit),  # there 0, which here would be a limit
            "current_usage_gb": request.bytes_of().get(tenant, 0) / _GIB,
            "exists": limit is not None,
        }

    def _set_quota(self, request: Request, path: str) -> Answer:
        raise Refused(
            501,
            "quotas are settings: start kvkeepd with --eviction-policy IsolatedLRU --tenant-quotas "
            f"'{json.dumps({('' if path == _NOBODY else path): 64})}' (GiB of L1), or tenant_quotas in its file; what "
            "is cached survives the restart",
        )


# ---- what they have and we do not ----------------------------------------------------------------------------------

_NEVER = {
    "/run_script": "kvkeep runs no code that is sent to it",
    "/env": "the environment is shown to nobody; `kvkeepd --print-config` prints the settings and where they came from",
    "/config": "`kvkeepd --print-config` prints the settings and where they came from",
    "/config/adapters": "the L2 adapters are in /status, and in `kvkeep l2 stat`",
    "/cache/checksums": "kvkeep sees no memory of engines; `kvkeep l2 verify` checks what is in L2",
    "/loglevel": "the level is a setting: --log-level",
    "/threads": "/healthz says whether control moves; there are no threads to look at",
    "/periodic-threads": "/healthz says whether control moves; there are no threads to look at",
    "/periodic-threads-health": "/healthz says whether control moves; there are no threads to look at",
    "/metrics/reset": "counters only grow: take differences, as Prometheus does",
    "/lmc_version": "this is not LMCache: /version has the version of kvkeep",
    "/commit_id": "this is not LMCache: /version has the version of kvkeep",
}


def what_instead(path: str) -> str:
    """A sentence for a path of `lmcache server` that is not served; "" = it has no such path either."""
    if path.startswith("/reconfigure/"):
        return "adapters and memory are settings: start kvkeepd anew, what is cached survives the restart"
    if path.startswith("/periodic-threads/"):
        path = "/periodic-threads"
    return _NEVER.get(path, "")


# ---- status --------------------------------------------------------------------------------------------------------


def status_of(document: Mapping[str, Any], settings: Settings, *, healthy: bool) -> dict[str, Any]:
    """What /status says there, as far as it is a fact here too."""
    l1: Mapping[str, Any] = document.get("l1") or {}
    used, total = l1.get("bytes_used", 0), l1.get("bytes_total", 0)
    manager = {
        "is_healthy": healthy,
        "total_object_count": l1.get("entries", 0),
        "staging_bytes": l1.get("reserved_bytes", 0),
        "memory_used_bytes": used,
        "memory_total_bytes": total,
        "memory_configured_bytes": total,
        "memory_usage_ratio": used / total if total else 0.0,
        "capacity_bytes_by_backend": {"dram": total},
    }
    adapters = [
        {
            "type": row.get("type"),
            "is_healthy": row.get("phase") == "serving" and row.get("breaker") == "closed",
            "stored_object_count": row.get("objects"),
        }
        for row in document.get("l2") or []
    ]
    eviction = {"eviction_policy": settings.eviction_policy} if settings.eviction_policy else {}
    return {
        "is_healthy": healthy,
        "engine_type": "kvkeep",
        **({"chunk_size": settings.chunk_size} if settings.chunk_size else {}),
        "storage_manager": {
            "is_healthy": healthy,
            "l1_manager": manager,
            "eviction_controller": eviction,
            "l1_eviction_controller": eviction,
            "l2_adapters": adapters,
            "num_l2_adapters": len(adapters),
        },
    }


# ---- parts ---------------------------------------------------------------------------------------------------------


def _pattern(path: str) -> str:
    """With the last part cut off where that is a name."""
    for prefix in ("/cache/prefetches/", "/quota/"):
        if path.startswith(prefix) and len(path) > len(prefix):
            return prefix
    return path


def _one_of(body: Mapping[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    value = body.get(name, default)
    if value not in choices:
        raise Refused(400, f"{name} {value!r} is not one of {', '.join(choices)}")
    return str(value)


def _no_force(body: Mapping[str, Any]) -> None:
    if body.get("force", False) is not False:
        raise Refused(
            501, "memory is never taken from its readers: leave out 'force', and ask again for what was in use"
        )


def _whole(text: str, name: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdecimal() or not low <= int(text[:10]) <= high:
        raise Refused(400, f"{name} {text[:32]!r} is not a number from {low} to {high}")
    return int(text)


def _left(dropped: Any, tier: str) -> dict[str, Any]:
    """What a clear that reached L2 says of it."""
    if tier == "l1":
        return {}
    return {"in_use": dropped.in_use, "l2": list(dropped.l2)} | (
        {"problem": dropped.problem} if dropped.problem else {}
    )


def _adapter(rows: list[dict[str, Any]], which: str | None) -> dict[str, Any]:
    """By type, name or label; the first when nothing is asked for."""
    if not rows:
        raise Refused(503, "no L2 adapters are configured: see --l2-adapter")
    for row in rows:
        if which in (None, row["type"], row["name"], row["label"]):
            return row
    names = ", ".join(f"{row['name']} ({row['type']})" for row in rows)
    raise Refused(404, f"there is no L2 adapter {which!r}; there are {names}")


def _entry(row: Mapping[str, Any], manifest: Any) -> dict[str, Any]:
    model, salt = _about(manifest)
    shard, shards = int(row["shard"]), int(row["shards"])
    return {
        "chunk_hash_hex": row["chunk"],
        "model_name": model,
        "kv_rank": shards << 24 | shard << 16 | shards << 8 | shard,  # their packing; all ranks on this node
        "object_group_id": 0,
        "cache_salt": salt,
        "bytes": row["bytes"],
        "namespace": row["namespace"],
    }


def _about(manifest: Any) -> tuple[str, str]:
    """Model and salt of a namespace."""
    found = manifest if isinstance(manifest, dict) else {}
    return str(found.get("model", "")), str(found.get("tenant", ""))


def _key(at: int, key: Any) -> tuple[bytes, tuple[str, str]]:
    try:
        chunk = bytes.fromhex(key["chunk_hash_hex"])
        about = key["model_name"], key.get("cache_salt", "")
    except (TypeError, KeyError, ValueError, AttributeError):
        raise Refused(400, f"keys[{at}] has no 'chunk_hash_hex' and 'model_name'") from None
    if len(chunk) != _HASH_BYTES:
        raise Refused(400, f"keys[{at}] has a chunk hash of {len(chunk)} bytes; it has {_HASH_BYTES}")
    return chunk, about


def _hashes(tokens: list[Any], chunk_size: int) -> bytes:
    """Of whole chunks, as the gateway for LMCache's connector hashes them."""
    import msgspec

    from kvkeep.ipc.lmcache.chains import Chains
    from kvkeep.ipc.lmcache.wire import BadRequest

    try:
        return Chains(chunk_size).of(msgspec.msgpack.encode(tokens), "")
    except BadRequest as problem:
        raise Refused(400, str(problem)) from None


def _serves(manifest: Any, model: str, ranks: int, chunk_size: int) -> bool:
    """It is a namespace of workers of LMCache's connector."""
    found = manifest if isinstance(manifest, dict) else {}
    about = (found.get("engine"), found.get("model"), found.get("ranks"), found.get("chunk_tokens"))
    return about == ("lmcache-mp", model, ranks, chunk_size)


def _plain(manifest: Mapping[str, Any]) -> str:
    """The same for all tenants."""
    return json.dumps({key: value for key, value in manifest.items() if key != "tenant"}, sort_keys=True)


def _wanted(space: Mapping[str, Any], salt: str, hashes: bytes) -> Wanted:
    return Wanted(json.loads(_plain(space["manifest"])), salt, int(space["shards"]), int(space["shard_bytes"]), hashes)
