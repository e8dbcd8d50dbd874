"""`kvkeep l2 …` through the daemon: one step of management is one Manage job for one mover, and one reply.

Nothing is kept here between the steps but which replies are still owed: the cursor travels with the asker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.daemon.movers import Mover
from kvkeep.l2.maintenance import Step, What

# For everybody who may attach; the others change something or cost a lot.
READING = (What.LIST, What.TALLY, What.MANIFEST)
ASKED = (*READING, What.VERIFY, What.COMPACT)


def find(movers: Sequence[Mover], name: str) -> Mover | None:
    """By its number ("l2-0"), or by its label if that is only one's."""
    labelled = [mover for mover in movers if mover.label == name]
    exact = [mover for mover in movers if mover.name == name]
    return (exact or labelled)[0] if len(exact or labelled) == 1 else None


def what_of(word: str) -> What | None:
    return next((what for what in ASKED if what.value == word), None)


def ask(
    mover: Mover, what: What, namespace: bytes, cursor: bytes, limit: int, reply: Callable[[dict[str, Any]], None]
) -> None:
    """``reply`` is called once, now or later, within the deadline of the step."""

    def done(step: Step | None, problem: str) -> None:
        reply({"problem": problem} if step is None else document(step))

    mover.manage(what, done, namespace=namespace, cursor=cursor, limit=limit)


def document(step: Step) -> dict[str, Any]:
    """A step as JSON."""
    return {
        "cursor": step.cursor.hex(),
        "objects": step.objects,
        "bytes": step.nbytes,
        "corrupt": step.corrupt,
        "unreadable": step.unreadable,
        "rows": [
            {
                "namespace": row.namespace.hex(),
                "chunk": row.chunk.hex(),
                "shard": row.shard,
                "shards": row.shards,
                "bytes": row.nbytes,
                "serdes": list(row.serdes),
            }
            for row in step.rows
        ],
        "namespaces": {space.hex(): {"objects": n, "bytes": size} for space, (n, size) in step.spaces.items()},
        "details": step.details,
        "did": step.did,
        "manifest": _manifest(step.manifest),
        "tenants": {
            name: {"bytes": nbytes, "quota": quota if quota >= 0 else None}
            for name, (nbytes, quota) in step.tenants.items()
        },
    }


def _manifest(text: bytes) -> Any:
    """None = it is not known.  What lies on a medium may be anything."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def encode(found: dict[str, Any]) -> bytes:
    return json.dumps(found).encode()
