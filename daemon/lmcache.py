"""Flags of `lmcache server` that kvkeep does not have, and what to use instead.

Who replaces that server starts from its command line.  A flag that means the same here has the same name and is in
`options`; every other flag is refused with one sentence rather than ignored, because an ignored flag is a surprise
later.
"""

from __future__ import annotations

from collections.abc import Sequence

_SOCKETS = "engines attach through Unix sockets in --run-dir; there is no TCP port to set"
_L2 = "use --l2-adapter, --l2-store-policy, --l2-prefetch-policy or --l2-prefetch-max-in-flight"
_NEVER_REAPED = "leave it out: a client lives as long as its connection, an idle one is never reaped"
_NO_TTL = "leave it out: reads and writes are held by their owner's connection, not by a time limit"
_LAZY = "leave it out: memory is always reserved in the background, clients attach at once"
_ONE_THREAD = "leave it out: one control thread serves all; there are no worker pools to size"
_KEYS = "leave it out: identity is blake3 over the whole manifest, the same in every process"
_WEB = "leave it out: metrics are Prometheus text at --http-port, and cost the control process nothing"
_LOCAL = "leave it out: one daemon serves one node, and opens no connection to others"
_NO_SCRIPTS = "leave it out: kvkeep never runs code that a peer or a file sent"

_EXACT = {
    "transport": _SOCKETS,
    "grpc-server-workers": _SOCKETS,
    "instance-id": "use --name",
    "null-block-id": "leave it out: the connector knows its engine's block ids",
    "max-workers": _ONE_THREAD,
    "max-gpu-workers": _ONE_THREAD,
    "max-cpu-workers": _ONE_THREAD,
    "hash-algorithm": _KEYS,
    "engine-type": "leave it out: there is one kind of engine, attached by connector",
    "supported-transfer-mode": "use engine_driven, and set lmcache.mp.mp_transfer_mode to it in the engine's "
    "kv_connector_extra_config: workers copy between their GPU and the arena themselves",
    "isolated-ipc": "leave it out: memory is handed over by file descriptor, so containers need not share IPC",
    "separate-object-groups": "leave it out: the layout of groups is part of the manifest that a client registers",
    "session-ttl-seconds": _NEVER_REAPED,
    "kv-event-log-size": "this version has no event log yet: leave it out",
    "enable": "leave it out: there are no experimental modules",
    "l1-manager": "use --l1-size-gb: L1 is one arena in shared memory",
    "l1-init-size-gb": _LAZY,
    "l1-align-bytes": "leave it out: extents are always aligned to 4096 bytes",
    "l1-devdax-path": "leave it out: L1 is in POSIX shared memory",
    "l1-write-ttl-seconds": _NO_TTL,
    "l1-read-ttl-seconds": _NO_TTL,
    "periodic-notifier-interval-ms": "leave it out: completions are signalled by eventfd, nothing polls on a timer",
    "disable-observability": _WEB,
    "disable-metrics": _WEB,
    "disable-grpc-metrics": _WEB,
    "disable-logging": "use --log-level",
    "enable-tracing": _WEB,
    "otlp-endpoint": _WEB,
    "event-bus-queue-size": _WEB,
    "prometheus-port": "use --http-port: /metrics is there",
    "metrics-sample-rate": _WEB,
    "enable-extra-logging": "use --log-level debug",
    "extra-logging-interval": "use --log-level debug",
    "trace-level": "use --log-level debug",
    "trace-output": "use --log-level debug",
}

_PREFIXES = {
    "l2-": _L2,
    "worker-": _NEVER_REAPED,
    "enable-segmented": _KEYS,
    "enable-dedup": _KEYS,
    "enable-blend": _KEYS,
    "enable-gc-monitor": _WEB,
    "gc-monitor-": _WEB,
    "server-module": _NO_SCRIPTS,
    "runtime-plugin-": _NO_SCRIPTS,
    "run-script-": _NO_SCRIPTS,
    "script-allowed-": _NO_SCRIPTS,
    "gds-l1-": "leave it out: L1 is in shared memory of the host",
    "lookup-hash-log-": _WEB,
    "p2p-": _LOCAL,
    "coordinator-": _LOCAL,
}


_NO_VALUE = ("l1-use-lazy", "no-l1-use-lazy")
_MODES = ("engine_driven", "auto")
_CARRIED = {
    "shm-name": "workers are told the name of the arena's segment when they register",
    "supported-transfer-mode": "engine-driven workers are what is served",
    "l1-use-lazy": "memory is always reserved in the background",
    "no-l1-use-lazy": "memory is always reserved in the background",
}


def without_no_ops(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line of one who comes from `lmcache server` works as it is, if it asks for what kvkeepd does anyway.
    Such flags are taken out; for each a sentence."""
    rest, notes = [], []
    words = iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in _CARRIED:
            rest.append(word)
            continue
        taken = [word]
        if name not in _NO_VALUE and not equals:
            value = next(words, "")
            taken += [value] if value else []
        lacking = name not in _NO_VALUE and not value
        if lacking or (name == "supported-transfer-mode" and value not in _MODES):
            rest += taken
        else:
            notes.append(f"--{name} changes nothing here: {_CARRIED[name]}")
    return rest, notes


def instead(name: str) -> str | None:
    """What to use instead of LMCache's option ``name`` (without dashes in front), or None when LMCache has no such."""
    name = name.replace("_", "-")
    if name in _EXACT:
        return _EXACT[name]
    return next((hint for prefix, hint in _PREFIXES.items() if name.startswith(prefix)), None)
