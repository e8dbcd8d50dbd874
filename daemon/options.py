"""The table of options.  Flags, environment variables, file keys, help and checks all derive from it.

An option named ``l1-size-gb`` is the flag ``--l1-size-gb``, the variable ``KVKEEP_L1_SIZE_GB`` and the file key
``l1_size_gb``.  Names, and the meaning behind a name, are those of `lmcache server` where both have it.

A raw value comes from a flag or a variable as text, from a file as a TOML type.  `Option.parse` turns either into the
option's one Python type or raises ValueError with the rest of a sentence: what is wrong, the limit, what to give.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


@dataclass(frozen=True)
class Option:
    name: str
    kind: str  # a key of _PARSERS
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    flag_only: bool = False  # an act for this one start, not a setting
    group: str = ""  # "policy": where installed packages name theirs; ``choices`` are built in

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        return "--" + self.name

    @property
    def variable(self) -> str:
        return "KVKEEP_" + self.key.upper()

    def parse(self, raw: Any) -> Any:
        value = _PARSERS[self.kind](self, raw)
        if self.low is not None and self.high is not None and not self.low <= value <= self.high:
            side = "below" if value < self.low else "above"
            raise ValueError(
                f"{self.show(value)} is {side} what is allowed: give {_number(self.low)} to {_number(self.high)}"
                + (f" {self.unit}" if self.unit else "")
            )
        return value

    def show(self, value: Any) -> str:
        """For a message: the value with its unit."""
        text = _number(value) if isinstance(value, float) else str(value)
        return f"{text} {self.unit}".rstrip()

    def show_default(self) -> str:
        if self.default in ("", ()):
            return "empty"
        if self.kind == "mode":
            return f"{self.default:04o}"
        if self.kind == "bool":
            return "on" if self.default else "off"
        return self.show(self.default) if self.default else str(self.default)


def _number(value: float) -> str:
    return f"{value:.10g}"


def _text(option: Option, raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not text: put it in quotes")
    if "\0" in raw or "\n" in raw:
        raise ValueError(f"{raw!r} holds a line break or a NUL: give one line of text")
    return raw


def _int(option: Option, raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    try:
        return int(_text(option, raw).strip().replace("_", ""))
    except ValueError:
        raise ValueError(f"{raw!r} is not a whole number") from None


def _float(option: Option, raw: Any) -> float:
    try:
        if isinstance(raw, bool):
            raise ValueError
        value = float(raw)
    except (TypeError, ValueError):
        raise ValueError(f"{raw!r} is not a number") from None
    if value != value:
        raise ValueError(f"{raw!r} is not a number")
    return value


def _bool(option: Option, raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise ValueError(f"{raw!r} is neither true nor false")


def _choice(option: Option, raw: Any) -> str:
    for choice in option.choices:
        if isinstance(raw, str) and raw.lower() == choice.lower():
            return choice
    raise ValueError(f"{raw!r} is not one of {', '.join(option.choices)}")


def _policy(option: Option, raw: Any) -> str:
    """Built in, installed, or a module's; what is not built in is imported here, so that a mistake is found now."""
    from kvkeep.shm import registry

    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not text: give one of {', '.join(option.choices)}")
    built_in = next((choice for choice in option.choices if raw.lower() == choice.lower()), None)
    if built_in is None:
        registry.load(option.group, raw, option.choices)
    return built_in or raw


def _mode(option: Option, raw: Any) -> int:
    try:
        mode = int(raw, 8) if isinstance(raw, str) else -1
    except ValueError:
        mode = -1
    if not 0o600 <= mode <= 0o777 or mode & 0o600 != 0o600:
        raise ValueError(f"{raw!r} is not an octal mode in which the owner may read and write: give '0660', say")
    return mode


def _ids(option: Option, raw: Any) -> tuple[int, ...]:
    """Numbers or names, separated by commas, or a TOML list of them."""
    items = raw if isinstance(raw, list) else _text(option, raw).split(",") if isinstance(raw, str) else [raw]
    found: list[int] = []
    for item in items:
        if isinstance(item, str):
            item = item.strip()
            if not item:
                continue
            item = int(item) if item.isdecimal() else _lookup_id(option.kind, item)
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**32 - 1:
            raise ValueError(f"{item!r} is no id: give numbers or names, separated by commas")
        found.append(item)
    return tuple(dict.fromkeys(found))


def _lookup_id(kind: str, name: str) -> int:
    import grp
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid if kind == "users" else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"{name!r} is not among this host's {kind}: give the number, or create it") from None


def _adapters(option: Option, raw: Any) -> tuple[str, ...]:
    """JSON objects: one in a variable or flag (a flag may stand several times), or a list of them, or TOML tables."""
    items = raw if isinstance(raw, list) else [raw]
    found: list[str] = []
    for item in items:
        if isinstance(item, str):
            if not item.strip():
                continue
            from kvkeep.l2.options import parse_json

            try:
                item = parse_json(item)
            except ValueError as problem:
                raise ValueError(f"{item!r} is not JSON ({problem}): give an object like {_EXAMPLE}") from None
        for one in item if isinstance(item, list) else [item]:
            if not isinstance(one, dict):
                raise ValueError(f"{one!r} is not an object: give one like {_EXAMPLE}")
            _check_adapter(dict(one))
            found.append(json.dumps(one))
    if len(found) > MAX_ADAPTERS:
        raise ValueError(f"{len(found)} adapters are too many: give at most {MAX_ADAPTERS}")
    return tuple(found)


def _check_adapter(config: dict[str, Any]) -> None:
    """By the registry's own word.  What a third party wrote is not imported here, its mover will say what is wrong."""
    from kvkeep.l2 import registry, serde
    from kvkeep.l2.adapter import AdapterError

    threads = config.pop("threads", 4)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 2 <= threads <= 64:
        raise ValueError(f"'threads' is {threads!r}: give 2 to 64, one of which is for loads only")
    kind = config.get("type")
    try:
        registry.check_name(config)
        serde.check(config)
    except AdapterError as problem:
        raise ValueError(str(problem)) from None
    if kind == registry.PLUGIN or (kind not in registry.BUILT_IN and kind in registry.adapter_types()):
        return
    try:
        registry.create_adapter(config)
    except AdapterError as problem:
        raise ValueError(str(problem)) from None


def _quotas(option: Option, raw: Any) -> str:
    """A JSON object or a TOML table: GiB per tenant.  Kept as JSON."""
    try:
        found = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError as problem:
        raise ValueError(f"{raw!r} is not JSON ({problem}): give an object like {_QUOTAS_EXAMPLE}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{raw!r} is not an object: give one like {_QUOTAS_EXAMPLE}")
    for tenant, gib in found.items():
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib <= 4096:
            raise ValueError(f"the quota of {tenant!r} is {gib!r}: give 0 to 4096 GiB")
    return json.dumps(found)


_QUOTAS_EXAMPLE = '{"team-a": 64, "team-b": 16}'
_EXAMPLE = '{"type": "fs", "base_path": "/var/cache/kvkeep"}'
MAX_ADAPTERS = 16

_PARSERS: dict[str, Any] = {
    "adapters": _adapters,
    "text": _text,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "choice": _choice,
    "policy": _policy,
    "quotas": _quotas,
    "users": _ids,
    "groups": _ids,
    "mode": _mode,
}

OPTIONS: tuple[Option, ...] = (
    Option("name", "text", "default", "name of this instance: several can run side by side"),
    Option(
        "run-dir",
        "text",
        "",
        "folder of the sockets and the lock; empty = /run/kvkeep/NAME for root, $XDG_RUNTIME_DIR/kvkeep/NAME otherwise",
    ),
    Option(
        "l1-size-gb",
        "float",
        4.0,
        "shared memory for KV, for the whole node, all engines and ranks together",
        low=0.004,
        high=4096,
        unit="GiB",
    ),
    Option(
        "l1-entries",
        "int",
        0,
        "chunks that can be held at once; 0 = one per 64 KiB of --l1-size-gb",
        low=0,
        high=256 * 1024 * 1024,
        unit="chunks",
    ),
    Option("l1-slab-mb", "int", 0, "unit in which memory moves between models; 0 = by size", 0, 1024, "MiB"),
    Option(
        "l1-use-hugepages",
        "bool",
        False,
        "ask for transparent huge pages for the arena; falls back to 4 KiB pages, and says so",
    ),
    Option(
        "l1-mlock",
        "bool",
        False,
        "lock the arena in memory; needs RLIMIT_MEMLOCK; falls back to unlocked, and says so",
    ),
    Option("chunk-size", "int", 256, "tokens per chunk that clients use unless they say otherwise", 1, 65536, "tokens"),
    Option(
        "eviction-policy",
        "policy",
        "LRU",
        "what goes when memory is short, of every chain its tail first: Adaptive = what it learnt to be used least, "
        "ARC, S3FIFO, LRU, IsolatedLRU = LRU with quotas; noop = nothing, stores are refused",
        choices=("Adaptive", "ARC", "S3FIFO", "LRU", "IsolatedLRU", "noop"),
        group="kvkeep.eviction_policies",
    ),
    Option(
        "eviction-trigger-watermark", "float", 0.95, "share of the bytes in use at which eviction starts", 0.01, 1.0
    ),
    Option("eviction-ratio", "float", 0.05, "share of the bytes that one round of eviction frees", 0.001, 1.0),
    Option(
        "tenant-quotas",
        "quotas",
        "{}",
        f'with IsolatedLRU: GiB of L1 per tenant (the "tenant" of a manifest), e.g. {_QUOTAS_EXAMPLE}',
    ),
    Option(
        "l2-adapter",
        "adapters",
        (),
        f"where KV outlives memory, e.g. {_EXAMPLE}; may be given several times, asked in the order given",
    ),
    Option(
        "l2-store-policy",
        "policy",
        "default",
        "default: what L1 gets goes to every adapter and stays in L1; skip_l1: it leaves L1 when it is stored",
        choices=("default", "skip_l1"),
        group="kvkeep.store_policies",
    ),
    Option(
        "l2-prefetch-policy",
        "policy",
        "default",
        "default: what is loaded from L2 leaves L1 with its last reader; retain: it stays, like anything else",
        choices=("default", "retain"),
        group="kvkeep.prefetch_policies",
    ),
    Option("l2-prefetch-max-in-flight", "int", 8, "lookups that load from L2 at a time", 1, 1024, "lookups"),
    Option("l2-drain-seconds", "float", 5.0, "what a stop may spend on storing what is left", 0, 600, "s"),
    Option("max-clients", "int", 4096, "clients that may be attached at once", 1, 4096, "clients"),
    Option("allow-uids", "users", (), "users that may attach, by number or name; empty = whom the socket mode lets in"),
    Option("allow-gids", "groups", (), "groups whose members may attach; empty = whom the socket mode lets in"),
    Option("admin-uids", "users", (), "users that may clear, delete and pin, besides root and the daemon's own"),
    Option("socket-group", "text", "", "group that owns the sockets; empty = the daemon's own"),
    Option("socket-mode", "mode", 0o660, "access mode of the sockets, octal"),
    Option("host", "text", "127.0.0.1", "address that connectors of LMCache attach to; a loopback one unless you ask"),
    Option("port", "int", -1, "port for connectors of LMCache (5555 is theirs); -1 = off, 0 = any free", -1, 65535),
    Option("http-host", "text", "127.0.0.1", "address that the web process listens on; a loopback one unless you ask"),
    Option("http-port", "int", -1, "port of the web process (metrics, page); -1 = off, 0 = any free", -1, 65535),
    Option("log-level", "choice", "info", "debug, info, warning, error", choices=("debug", "info", "warning", "error")),
    Option(
        "log-format",
        "choice",
        "auto",
        "text, json, or auto: text on a terminal, JSON lines elsewhere",
        choices=("auto", "text", "json"),
    ),
    Option(
        "forget", "bool", False, "drop an arena that an earlier daemon left, instead of adopting it", flag_only=True
    ),
)

BY_KEY: dict[str, Option] = {option.key: option for option in OPTIONS}
