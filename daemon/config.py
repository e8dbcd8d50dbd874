"""One strict parser for flags, environment, TOML file and defaults, in this order of precedence.

    load(argv, environ) -> Loaded     every value, and where it came from
    Loaded.config: Config             what the rest of the daemon reads; frozen

Strict means: an unknown flag, an unknown ``KVKEEP_*`` variable and an unknown key in the file are errors with the
nearest known name, and every value is checked against the option's range whatever its source.  A setting that is
silently not applied costs its owner a day.

The file is flat TOML: ``l1_size_gb = 64`` (dashes work too).  `--print-config` prints such a file, so what it printed
can be given back with ``--config``.  An empty environment variable counts as unset.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kvkeep.daemon import lmcache
from kvkeep.daemon.options import BY_KEY, OPTIONS, Option
from kvkeep.ipc.rundir import run_dir_of

GIB = 1 << 30
PAGE = 4096
MIN_ENTRIES = 4096
BYTES_PER_ENTRY = 64 * 1024  # what auto sizing assumes; far below a real chunk, so the table is never the limit
MAX_SUN_PATH = 107
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
LONGEST_SOCKET = "attach.sock"


class ConfigError(Exception):
    """One sentence for the user: the value, the limit, the fix."""


@dataclass(frozen=True)
class Config:
    """The settings of one daemon.  `load` makes it from outside; tests may construct it directly."""

    name: str
    run_dir: str
    l1_bytes: int
    l1_entries: int = 0  # 0 = auto, see `entries`
    l1_slab_mb: int = 0  # 0 = auto
    l1_use_hugepages: bool = False
    l1_mlock: bool = False
    chunk_size: int = 256
    eviction_policy: str = "LRU"
    eviction_trigger_watermark: float = 0.95
    eviction_ratio: float = 0.05
    tenant_quotas: str = "{}"  # a JSON object: GiB per tenant
    max_clients: int = 4096
    allow_uids: tuple[int, ...] = ()
    allow_gids: tuple[int, ...] = ()
    admin_uids: tuple[int, ...] = ()
    socket_group: str = ""
    socket_mode: int = 0o660
    host: str = "127.0.0.1"
    port: int = -1
    http_host: str = "127.0.0.1"
    http_port: int = -1
    log_level: str = "info"
    log_format: str = "auto"
    forget: bool = False
    l2_adapter: tuple[str, ...] = ()  # JSON objects
    l2_store_policy: str = "default"
    l2_prefetch_policy: str = "default"
    l2_prefetch_max_in_flight: int = 8
    l2_drain_seconds: float = 5.0

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """What to keep L2 in, in the order in which it is asked."""
        return [json.loads(text) for text in self.l2_adapter]

    @property
    def quotas(self) -> dict[str, float]:
        """GiB of L1 per tenant."""
        quotas: dict[str, float] = json.loads(self.tenant_quotas)
        return quotas

    @property
    def entries(self) -> int:
        """Capacity of the entry table."""
        return self.l1_entries or max(MIN_ENTRIES, self.l1_bytes // BYTES_PER_ENTRY)

    @property
    def attach_path(self) -> str:
        return os.path.join(self.run_dir, "attach.sock")

    @property
    def rpc_path(self) -> str:
        return os.path.join(self.run_dir, "rpc.sock")

    @property
    def lock_path(self) -> str:
        return os.path.join(self.run_dir, "lock")


@dataclass(frozen=True)
class Loaded:
    config: Config
    values: dict[str, Any]  # by option key, as given
    origins: dict[str, str]  # by option key: "flag --x", "environment KVKEEP_X", "file PATH", "default"
    print_config: bool = False

    def as_toml(self, *, only_given: bool = False) -> str:
        """Every setting and where it came from; a valid ``--config`` file.  ``only_given``: without the defaults."""
        settings = [option for option in OPTIONS if not option.flag_only]
        if only_given:
            settings = [option for option in settings if self.origins[option.key] != "default"]
        lines = [f"{option.key} = {_toml(option, self.values[option.key])}" for option in settings]
        width = max(map(len, lines), default=0)
        return "".join(
            f"{line:<{width}}  # {self.origins[option.key]}\n" for line, option in zip(lines, settings, strict=True)
        )


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r} cannot be used: give 1 to 63 of a-z, 0-9, '-' and '_', beginning with a letter or digit"
        )
    return name


def check_run_dir(run_dir: str) -> str:
    if not os.path.isabs(run_dir):
        raise ConfigError(f"run dir {run_dir!r} is relative: give an absolute path with --run-dir")
    length = len(os.fsencode(os.path.join(run_dir, LONGEST_SOCKET)))
    if length > MAX_SUN_PATH:
        raise ConfigError(
            f"socket path {os.path.join(run_dir, LONGEST_SOCKET)} has {length} bytes, the system's limit is "
            f"{MAX_SUN_PATH}: give a shorter --run-dir"
        )
    return run_dir


def load(argv: Sequence[str], environ: Mapping[str, str] | None = None, prog: str = "kvkeepd") -> Loaded:
    """Raises ConfigError; exits by SystemExit only for --help and --version."""
    environ = os.environ if environ is None else environ
    given = _from_flags(argv, prog)
    path = given.pop("config", None) or environ.get("KVKEEP_CONFIG") or None
    print_config = bool(given.pop("print_config", False))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(option: Option, raw: Any, origin: str) -> None:
        try:
            values[option.key] = option.parse(raw)
        except ValueError as problem:
            raise ConfigError(f"{origin}: {problem}") from None
        origins[option.key] = origin

    for option in OPTIONS:
        values[option.key], origins[option.key] = option.default, "default"
    if path:
        for key, raw in _from_file(path).items():
            take(BY_KEY[key], raw, f"file {path}, {key}")
    for option, raw in _from_environment(environ):
        take(option, raw, f"environment {option.variable}")
    for key, raw in given.items():
        take(BY_KEY[key], raw, f"flag {BY_KEY[key].flag}")

    check_name(values["name"])
    if not values["run_dir"]:
        values["run_dir"] = run_dir_of(values["name"])
    check_run_dir(values["run_dir"])
    fields = {key: value for key, value in values.items() if key != "l1_size_gb"}
    config = Config(l1_bytes=int(values["l1_size_gb"] * GIB) // PAGE * PAGE, **fields)
    _check_together(config)
    return Loaded(config, values, origins, print_config)


def _check_together(config: Config) -> None:
    """What no option can check alone."""
    slab = config.l1_slab_mb << 20
    if slab and not slab <= config.l1_bytes <= slab * 16384:
        raise ConfigError(
            f"--l1-slab-mb {config.l1_slab_mb} does not fit an L1 of {config.l1_bytes / GIB:.10g} GiB, which must be 1 "
            "to 16384 slabs: leave --l1-slab-mb at 0"
        )
    if config.socket_group:
        import grp

        try:
            grp.getgrnam(config.socket_group)
        except KeyError:
            raise ConfigError(
                f"--socket-group {config.socket_group!r} is not among this host's groups: create it, or leave it empty"
            ) from None
    _check_policies(config)
    if config.quotas and config.eviction_policy != "IsolatedLRU":
        raise ConfigError(
            f"--tenant-quotas needs --eviction-policy IsolatedLRU, which is {config.eviction_policy}: set it, or leave "
            "out the quotas"
        )
    if not config.host:
        raise ConfigError("--host is empty: give an address such as 127.0.0.1")
    if not config.http_host:
        raise ConfigError("--http-host is empty: give an address such as 127.0.0.1")


def _check_policies(config: Config) -> None:
    """Those that are not built in: `Option.parse` has imported them, here they have to be what they should."""
    for key in ("l2_store_policy", "l2_prefetch_policy"):
        option, name = BY_KEY[key], getattr(config, key)
        if name not in option.choices:
            from kvkeep.daemon import l2_policies

            try:
                (l2_policies.store_policy if key == "l2_store_policy" else l2_policies.prefetch_policy)(name)
            except ValueError as problem:
                raise ConfigError(f"{option.flag} {problem}") from None


# ---- sources -------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists the flags")


def _from_flags(argv: Sequence[str], prog: str) -> dict[str, Any]:
    known, unknown = _parser(prog).parse_known_args(lmcache.without_no_ops(argv)[0])
    if unknown:
        raise ConfigError(_unknown_flag(unknown[0]))
    return dict(vars(known))


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=112),
        description="Keeps the KV cache of all LLM engines on this node in shared memory.",
        epilog="Each setting is also an environment variable (KVKEEP_L1_SIZE_GB=64) and a key of the file given with "
        "--config (l1_size_gb = 64). A flag wins over the environment, the environment over the file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print each setting and where it came from; exit")
    parser.add_argument("--version", action="version", version=_LazyVersion())
    for option in OPTIONS:
        text = f"{option.help} (default: {option.show_default()})".replace("%", "%%")
        if option.kind == "bool":
            parser.add_argument(option.flag, dest=option.key, nargs="?", const="true", metavar="BOOL", help=text)
            off = f"--no-{option.name}"
            parser.add_argument(off, dest=option.key, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            action = "append" if option.kind == "adapters" else "store"
            metavar = "JSON" if option.kind == "adapters" else option.kind.upper()
            parser.add_argument(option.flag, dest=option.key, metavar=metavar, help=text, action=action)
    return parser


class _LazyVersion(str):
    """The package's version, looked up only when it is printed: importlib.metadata is slow to import."""

    def __mod__(self, _: Any) -> str:
        return version()


def version() -> str:
    from importlib import metadata

    try:
        return f"kvkeep {metadata.version('kvkeep')}"
    except metadata.PackageNotFoundError:
        return "kvkeep (not installed)"


def _from_environment(environ: Mapping[str, str]) -> Iterable[tuple[Option, str]]:
    by_variable = {option.variable: option for option in OPTIONS if not option.flag_only}
    for variable, raw in sorted(environ.items()):
        if not variable.startswith("KVKEEP_") or variable == "KVKEEP_CONFIG":
            continue
        option = by_variable.get(variable)
        if option is None:
            hint = lmcache.instead(variable[len("KVKEEP_") :].lower()) or _nearest(variable, by_variable)
            raise ConfigError(f"environment {variable} is not a setting of kvkeepd: {hint}")
        if raw != "":
            yield option, raw


def _from_file(path: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as problem:
        raise ConfigError(f"file {path} cannot be read ({problem.strerror}): check --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"file {path} is not valid TOML: {problem}") from None
    values: dict[str, Any] = {}
    keys = [option.key for option in OPTIONS if not option.flag_only]
    for written, raw in document.items():
        key = written.replace("-", "_")
        if key not in keys:
            hint = lmcache.instead(key) or _nearest(key, keys)
            raise ConfigError(f"file {path}: {written!r} is not a setting of kvkeepd: {hint}")
        if key in values:
            raise ConfigError(f"file {path}: {key!r} is given twice, with '-' and with '_': keep one")
        values[key] = raw
    return values


def _unknown_flag(token: str) -> str:
    if not token.startswith("-"):
        return f"{token!r} is not a flag: kvkeepd takes flags only, see kvkeepd --help"
    name = token.lstrip("-").split("=", 1)[0]
    hint = lmcache.instead(name)
    if hint is not None:
        return f"--{name} is a flag of lmcache server that kvkeepd does not have: {hint}"
    return f"--{name} is not a flag of kvkeepd: {_nearest('--' + name, [option.flag for option in OPTIONS])}"


def _nearest(word: str, known: Iterable[str]) -> str:
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {found[0]}?" if found else "kvkeepd --help lists what there is"


def _toml(option: Option, value: Any) -> str:
    if option.kind == "mode":
        return f'"{value:04o}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_text(item) if isinstance(item, str) else str(item) for item in value) + "]"
    if isinstance(value, str):
        return _toml_text(value)
    return repr(value)


def _toml_text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
