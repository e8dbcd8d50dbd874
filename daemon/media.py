"""Which medium an adapter keeps its objects on, by its configuration alone: one name per place.

What is remembered of a medium (see forget.py) is to hold as long as the bytes are there, whatever else of the adapter's
configuration changes: its limit, its label, its place among the others, or another directory that is added.  So only
the type and the places count: of `fs` each directory, of `raw_block` the file or device, of an adapter of somebody
else's every option that is a text, since one of them will say where.

Paths are as configured, made absolute; links are not followed, since nobody knows what waits behind them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_PLACES = {"fs": "base_path", "raw_block": "path"}  # the option that says where
_NOT_A_PLACE = ("type", "name", "serde", "eviction")  # of adapters of somebody else's


def media_of(adapter: Mapping[str, Any]) -> list[str]:
    """Names of the places of this configuration, at least one."""
    kind, inner = str(adapter.get("type")), adapter.get("inner")
    if kind == "fault_inject" and isinstance(inner, Mapping):
        return media_of(inner)
    if kind in _PLACES:
        return [f"{kind} {os.path.abspath(path)}" for path in _texts(adapter.get(_PLACES[kind]))] or [kind]
    texts = [f"{key}={text}" for key in sorted(adapter) if key not in _NOT_A_PLACE for text in _texts(adapter[key])]
    return [" ".join([kind, *texts])]


def _texts(value: object) -> list[str]:
    found = value if isinstance(value, list) else [value]
    return [text for text in found if isinstance(text, str) and text]
