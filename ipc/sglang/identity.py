"""What the bytes of a page depend on, tokens excepted, and what is not cached.

SGLang's keys are a chain of sha256 over token ids, seeded with adapter and cache salt.  They name neither model nor
weights, dtype, layout or rank.  All that goes into the manifest of a namespace; a rank is a shard of it.  Change one
field and it is another namespace, so a mismatch is a miss and never a wrong byte.

The model's name is what users call it, so it does not tell weights apart: a fingerprint does (as for vLLM), or
``kvkeep.identity``.
"""

from __future__ import annotations

import importlib
from typing import Any

from blake3 import blake3

from kvkeep.ipc.sglang.pages import HostPages
from kvkeep.ipc.vllm import fingerprint  # of weights; knows nothing of vLLM

FORMAT = 1  # how a page lies in its extent
MAX_SHARDS = 64  # ranks that make a page

_HINT = "set kvkeep.identity to a text that is another for other weights and settings"

_MODEL = (
    "model_path", "revision", "load_format", "json_model_override_args", "dtype", "quantization",
    "quantization_param_path", "kv_cache_dtype", "modelopt_quant", "rl_quant_profile", "qsa_indexer_dtype",
)  # fmt: skip
_SPECULATION = ("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision")
_POOL = (
    "layout", "page_size", "start_layer", "end_layer", "layer_num", "target_layer_num", "head_num", "head_dim",
    "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "item_bytes", "storage_format_tag",
)  # fmt: skip


class Refused(Exception):
    """One sentence: why this engine runs without this cache."""


def topology(config: Any) -> dict[str, object]:
    """The parallel part of the identity, equal on all ranks that make a page together.  Raises Refused."""
    sizes = {name: int(getattr(config, name, 1) or 1) for name in ("tp_size", "pp_size", "attn_cp_size", "dcp_size")}
    if sizes["dcp_size"] != 1:
        raise Refused(f"dcp_size is {sizes['dcp_size']}: this version supports 1")
    if sizes["tp_size"] * sizes["attn_cp_size"] > MAX_SHARDS:
        raise Refused(f"tp_size {sizes['tp_size']} x attn_cp_size {sizes['attn_cp_size']} ranks, at most {MAX_SHARDS}")
    return {**sizes, "pp_rank": int(getattr(config, "pp_rank", 0)), "mla": bool(config.is_mla_model)}


def engine(model_name: str | None, named: str) -> dict[str, object]:
    """What the engine of this process computes with.  ``named``: kvkeep.identity.  Raises Refused."""
    model = _settings("get_model", _MODEL)
    if not _keys_name_adapters():
        raise Refused("the storage keys of this SGLang do not name adapter and salt; use 0.5.23 or newer")
    document: dict[str, object] = {"name": model_name, "identity": named, "sglang": _version()}
    if model is not None:
        document["model"] = {key: _text(value) for key, value in model.items()}
        document["kv_scales"] = _file_digest(model.get("quantization_param_path"))
        speculation = _settings("get_spec", _SPECULATION) or {}
        document["speculation"] = {key: _text(value) for key, value in speculation.items()}
        draft = speculation.get("speculative_draft_model_path")
        if draft and not named:
            revision = speculation.get("speculative_draft_model_revision")
            document["draft_weights"] = _weights(draft, revision, "auto")
    if not named:
        if model is None:
            raise Refused(f"the settings of this SGLang ({_version() or 'unknown'}) cannot be read: {_HINT}")
        document["weights"] = _weights(model["model_path"], model["revision"], str(model["load_format"]))
    return document


def _weights(model: str | None, revision: str | None, load_format: str) -> str:
    if not model or load_format == "dummy":
        raise Refused(f"nothing tells the weights apart from others ({load_format} weights of {model!r}): {_HINT}")
    try:
        return fingerprint.weights(str(model), revision, load_format, 0)
    except (fingerprint.NoFingerprint, ImportError, OSError) as error:
        raise Refused(f"{error}; or {_HINT}") from None


def pool(name: str, pages: HostPages) -> dict[str, object]:
    """What a page of this host pool is."""
    facts = {field: _text(getattr(pages.pool, field, None)) for field in _POOL}
    runs: list[list[int]] = []
    for size in pages.sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return {
        **facts,
        "name": name,
        "kind": type(pages.pool).__name__,
        "dtype": str(getattr(pages.pool, "dtype", None)),
        "packing": pages.packing,
        "runs": runs if len(runs) <= 64 else blake3(repr(runs).encode()).hexdigest(),
    }


def _settings(namespace: str, fields: tuple[str, ...]) -> dict[str, Any] | None:
    """The engine's own settings, as it resolved them.  None = not in this process, or another SGLang."""
    try:
        bag = getattr(importlib.import_module("sglang.srt.runtime_context"), namespace)()
        return {field: getattr(bag, field, None) for field in fields}
    except Exception:  # whatever an unknown version does: then there is no fingerprint without kvkeep.identity
        return None


def _keys_name_adapters() -> bool:
    """Whether SGLang seeds its chains with adapter and salt (its pull request 38577)."""
    try:
        return hasattr(importlib.import_module("sglang.srt.mem_cache.utils"), "storage_namespace_seed")
    except ImportError:  # not in an engine: there are no keys of SGLang's
        return True


def _version() -> str:
    try:
        return str(importlib.import_module("sglang.version").__version__)
    except Exception:
        return ""


def _file_digest(path: Any) -> str | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return blake3(file.read()).hexdigest()
    except OSError as error:
        raise Refused(f"the file of KV scales cannot be read: {error}") from None


def _text(value: Any) -> object:
    """A setting as JSON."""
    return value if value is None or isinstance(value, bool | int | str) else str(value)
