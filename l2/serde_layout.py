"""What a namespace's manifest says about the numbers in its payloads, as far as a serde can use it.

    dtype      "bfloat16", "float16", "float32", or "" if it is none of these or not said
    tokens     a payload is [any, tokens, channels] numbers, in this order; 0 = not known
    channels

The dtype is `kv_dtype`; if that is "auto", as engines say for "as the model's", `extras.dtype`.  Tokens and channels
come from `groups` (ipc/keys.py), if all groups have one shape, contiguous, with a dimension "token" in their order:
what follows it are the channels.  An engine that declares no groups (vLLM: it names a layout, and how many bytes a page
has, but not the heads in it, and one name stands for several packings) has unknown channels.

A manifest is a client's word: nothing of it is trusted to be there, to be of a type, or to be sane.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MOST = 1 << 24  # tokens, channels


class Layout(NamedTuple):
    dtype: str = ""
    tokens: int = 0
    channels: int = 0

    @property
    def item_bytes(self) -> int:
        """1 if the numbers are not known."""
        return ITEM_BYTES.get(self.dtype, 1)


UNKNOWN = Layout()


def layout_of(manifest: bytes) -> Layout:
    """UNKNOWN for whatever does not say it in the way above."""
    try:
        tree = msgspec.json.decode(manifest, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UNKNOWN
    name = tree.get("kv_dtype")
    extras = tree.get("extras")
    if name == "auto":
        name = extras.get("dtype") if isinstance(extras, dict) else None
    dtype = DTYPES.get(name.removeprefix("torch.").lower(), "") if isinstance(name, str) else ""
    return Layout(dtype, *_channels(tree.get("groups"))) if dtype else UNKNOWN


def _channels(groups: object) -> tuple[int, int]:
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return 0, 0
    found = {_channels_of(group) for group in groups}
    return found.pop() if len(found) == 1 else (0, 0)


def _channels_of(group: dict[str, object]) -> tuple[int, int]:
    shape, order = group.get("shape"), group.get("order")
    if not isinstance(shape, list) or not isinstance(order, str) or group.get("strides"):
        return 0, 0
    names = [name.strip() for name in order.split(",")]
    sizes = [size for size in shape if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _MOST]
    if len(sizes) != len(shape) or len(names) != len(shape) or names.count("token") != 1:
        return 0, 0
    at = names.index("token")
    channels = math.prod(sizes[at + 1 :])
    return (sizes[at], channels) if channels <= _MOST else (0, 0)
