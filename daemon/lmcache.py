"""The flags of `lmcache server`, and what becomes of each here.

    SAME     a flag of kvkeepd has this name and means the same: see `options`
    TAKEN    what it asks for is the case anyway, or is about a part that does not exist here: taken, and logged
    REFUSED  it asks for what kvkeepd does not have: one sentence, because an ignored flag is a surprise later

So the command line of one who comes from that server works as it is, unless it asks for something that is missing.
A flag that is refused is taken with a value that asks for nothing, its default mostly.

Names, kinds and defaults are those of version 0.5.6; `tests/lmcache/test_flags.py` compares them with the real parser.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

VERSION = "0.5.6"


class Verdict(enum.Enum):
    SAME = "same"
    TAKEN = "taken"
    REFUSED = "refused"


class Kind(enum.Enum):
    VALUE = "one value"
    VALUES = "any number of values"
    REPEATED = "one value, may be given several times"
    SWITCH = "--x or --no-x"
    MARK = "--x"


class Theirs(NamedTuple):
    kind: Kind
    default: str  # as it would be typed; "" = nothing
    verdict: Verdict
    why: str = ""  # TAKEN: what is the case; REFUSED: what to use instead
    fine: tuple[str, ...] | None = None  # REFUSED: the values that ask for nothing; None = the default


class Taken(NamedTuple):
    flag: str
    why: str


_THREADS = "one thread of control serves all, nothing is sized by it"
_OWNED = "what is being read or written is held by its owner's connection, not by a time limit"
_ATTACHED = "a worker is registered until it says otherwise or the arena is new, an idle one is never reaped"
_RESERVED = "memory is always reserved in the background, engines attach at once"
_PAGE = "metrics are made by a process of their own, and only at --http-port"
_SCRAPED = "leave it out: metrics are Prometheus text at --http-port, nothing is pushed anywhere"
_NO_SPANS = "leave it out: there are no traces; the metrics vllm:kvkeep_* and --log-level debug tell of single requests"
_DEBUG = "use --log-level debug"
_LOCAL = "leave it out: one daemon serves one node, and opens no connection to others"
_OWN_CODE = "leave it out: kvkeep never runs code that a peer or a file sent"
_SHM_ONLY = "leave it out and use --l1-size-gb: L1 is one arena in POSIX shared memory; a device is for --l2-adapter"
_PREFIXES = "leave it out: what is found is an exact prefix, there is no blending"
_GC = "leave it out: control freezes what lives at its start, so its collections are short and not logged"
_MODE = (
    "use engine_driven, and set lmcache.mp.mp_transfer_mode to it in the engine's kv_connector_extra_config: workers "
    "copy between their GPU and the arena themselves"
)

_FINE = "with this value it asks for nothing else than what is here"

_SAME, _TAKEN, _REFUSED = Verdict.SAME, Verdict.TAKEN, Verdict.REFUSED
_VALUE, _VALUES, _REPEATED, _SWITCH, _MARK = Kind.VALUE, Kind.VALUES, Kind.REPEATED, Kind.SWITCH, Kind.MARK

FLAGS: Mapping[str, Theirs] = {
    # server
    "instance-id": Theirs(_VALUE, "", _TAKEN, "nobody is told of it; --name is what this daemon is called"),
    "transport": Theirs(_VALUE, "zmq", _REFUSED, "use zmq, as LMCache's connector does unless told otherwise"),
    "host": Theirs(_VALUE, "localhost", _SAME),
    "port": Theirs(_VALUE, "5555", _SAME),
    "chunk-size": Theirs(_VALUE, "256", _SAME),
    "null-block-id": Theirs(_VALUE, "0", _TAKEN, "workers copy by themselves and know their engine's block ids"),
    "max-workers": Theirs(_VALUE, "1", _TAKEN, _THREADS),
    "max-gpu-workers": Theirs(_VALUE, "", _TAKEN, _THREADS),
    "max-cpu-workers": Theirs(_VALUE, "", _TAKEN, _THREADS),
    "grpc-server-workers": Theirs(_VALUE, "32", _TAKEN, _THREADS),
    "hash-algorithm": Theirs(_VALUE, "blake3", _TAKEN, "identity is blake3 over the whole manifest and the tokens"),
    "engine-type": Theirs(_VALUE, "default", _REFUSED, _PREFIXES),
    "supported-transfer-mode": Theirs(_VALUE, "lmcache_driven", _REFUSED, _MODE, ("engine_driven", "auto")),
    "isolated-ipc": Theirs(
        _SWITCH,
        "false",
        _REFUSED,
        "leave it out and share /dev/shm with LMCache's workers; kvkeep's own connector needs nothing shared",
    ),
    "runtime-plugin-locations": Theirs(_VALUES, "", _REFUSED, _OWN_CODE),
    "runtime-plugin-config": Theirs(_VALUE, "{}", _REFUSED, _OWN_CODE),
    "shm-name": Theirs(_VALUE, "", _TAKEN, "workers are told the name of the arena's segment when they register"),
    "script-allowed-imports": Theirs(_VALUES, "", _REFUSED, _OWN_CODE),
    "run-script-api-enabled": Theirs(_SWITCH, "false", _REFUSED, _OWN_CODE),
    "separate-object-groups": Theirs(
        _SWITCH, "false", _REFUSED, "leave it out and use kvkeep's own connector for hybrid models"
    ),
    "worker-reap-timeout-seconds": Theirs(_VALUE, "120", _TAKEN, _ATTACHED),
    "session-ttl-seconds": Theirs(_VALUE, "600", _TAKEN, _OWNED),
    "worker-registration-grace-seconds": Theirs(_VALUE, "3600", _TAKEN, _ATTACHED),
    "enable-segmented-prefix": Theirs(_MARK, "false", _REFUSED, _PREFIXES),
    "enable-dedup-content": Theirs(_MARK, "false", _REFUSED, _PREFIXES),
    "enable-blend-reorder": Theirs(_MARK, "false", _REFUSED, _PREFIXES),
    "enable": Theirs(_VALUES, "", _REFUSED, "leave it out: there are no experimental modules"),
    "kv-event-log-size": Theirs(
        _VALUE,
        "32768",
        _REFUSED,
        "leave it out or give 0: LMCache's connector gets no KV events here, kvkeep's own has them",
        ("0", "32768"),
    ),
    "server-module": Theirs(_REPEATED, "", _REFUSED, _OWN_CODE),
    # to other servers
    "p2p-advertise-url": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    "p2p-listen-url": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    "p2p-lookup-timeout": Theirs(_VALUE, "30", _REFUSED, _LOCAL),
    "p2p-load-timeout": Theirs(_VALUE, "30", _REFUSED, _LOCAL),
    "p2p-transfer-engine": Theirs(_VALUE, "nixl", _REFUSED, _LOCAL),
    "coordinator-url": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    "coordinator-advertise-ip": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    "coordinator-heartbeat-interval": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    "coordinator-event-reporting": Theirs(_MARK, "", _REFUSED, _LOCAL),
    "coordinator-event-flush-interval": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    "coordinator-event-transport": Theirs(_VALUE, "http", _REFUSED, _LOCAL),
    "coordinator-kafka-bootstrap-servers": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    "coordinator-kafka-topic": Theirs(_VALUE, "lmcache-cache-events", _REFUSED, _LOCAL),
    "coordinator-kafka-delivery-timeout": Theirs(_VALUE, "300", _REFUSED, _LOCAL),
    "coordinator-blend-timeout": Theirs(_VALUE, "1", _REFUSED, _LOCAL),
    "coordinator-blend-match-concurrency": Theirs(_VALUE, "8", _REFUSED, _LOCAL),
    "coordinator-l2-event-reporting": Theirs(_MARK, "", _REFUSED, _LOCAL),
    "coordinator-l2-event-flush-interval": Theirs(_VALUE, "", _REFUSED, _LOCAL),
    # L1
    "l1-manager": Theirs(_REPEATED, "", _REFUSED, "use --l1-size-gb: L1 is one arena in shared memory"),
    "l1-size-gb": Theirs(_VALUE, "", _SAME),
    "l1-use-lazy": Theirs(_SWITCH, "true", _TAKEN, _RESERVED),
    "l1-init-size-gb": Theirs(_VALUE, "20", _TAKEN, _RESERVED),
    "l1-align-bytes": Theirs(_VALUE, "4096", _TAKEN, "extents always begin at a page"),
    "l1-use-hugepages": Theirs(_SWITCH, "false", _SAME),
    "l1-devdax-path": Theirs(_VALUE, "", _REFUSED, _SHM_ONLY),
    "gds-l1-path": Theirs(_VALUE, "", _REFUSED, _SHM_ONLY),
    "gds-l1-use-direct-io": Theirs(_SWITCH, "true", _REFUSED, _SHM_ONLY),
    "gds-l1-backend": Theirs(_VALUE, "auto", _REFUSED, _SHM_ONLY),
    "l1-write-ttl-seconds": Theirs(_VALUE, "600", _TAKEN, _OWNED),
    "l1-read-ttl-seconds": Theirs(_VALUE, "300", _TAKEN, _OWNED),
    # eviction, L2
    "eviction-policy": Theirs(_VALUE, "", _SAME),
    "eviction-trigger-watermark": Theirs(_VALUE, "0.8", _SAME),
    "eviction-ratio": Theirs(_VALUE, "0.2", _SAME),
    "l2-store-policy": Theirs(_VALUE, "default", _SAME),
    "l2-prefetch-policy": Theirs(_VALUE, "default", _SAME),
    "l2-prefetch-max-in-flight": Theirs(_VALUE, "8", _SAME),
    "l2-adapter": Theirs(_REPEATED, "", _SAME),
    "periodic-notifier-interval-ms": Theirs(
        _VALUE, "5", _TAKEN, "completions are signalled by eventfd, nothing polls on a timer"
    ),
    # HTTP and observability
    "http-host": Theirs(_VALUE, "127.0.0.1", _SAME),
    "http-port": Theirs(_VALUE, "8080", _SAME),
    "disable-observability": Theirs(_MARK, "false", _TAKEN, _PAGE),
    "disable-metrics": Theirs(_MARK, "false", _TAKEN, _PAGE),
    "disable-grpc-metrics": Theirs(_MARK, "false", _TAKEN, _PAGE),
    "disable-logging": Theirs(_MARK, "false", _TAKEN, "single requests are logged at --log-level debug only"),
    "enable-tracing": Theirs(_MARK, "false", _REFUSED, _NO_SPANS),
    "otlp-endpoint": Theirs(_VALUE, "", _REFUSED, _SCRAPED),
    "event-bus-queue-size": Theirs(_VALUE, "10000", _TAKEN, "counters are counted where it happens, there is no queue"),
    "prometheus-port": Theirs(_VALUE, "9090", _TAKEN, "/metrics is at --http-port, as it is with `lmcache server`"),
    "metrics-sample-rate": Theirs(_VALUE, "0.01", _TAKEN, "every metric counts everything"),
    "lookup-hash-log-dir": Theirs(
        _VALUE, "", _REFUSED, "leave it out: hashes of prompts are not written to files; a trace is --log-level debug"
    ),
    "lookup-hash-log-rotation-interval": Theirs(_VALUE, "21600", _REFUSED, "leave it out: there is no such log"),
    "lookup-hash-log-rotation-max-size": Theirs(_VALUE, "104857600", _REFUSED, "leave it out: there is no such log"),
    "lookup-hash-log-max-files": Theirs(_VALUE, "100", _REFUSED, "leave it out: there is no such log"),
    "enable-gc-monitor": Theirs(_MARK, "false", _REFUSED, _GC),
    "gc-monitor-min-pause-ms": Theirs(_VALUE, "1", _REFUSED, _GC),
    "gc-monitor-top-objects": Theirs(_VALUE, "0", _REFUSED, _GC),
    "enable-extra-logging": Theirs(_MARK, "false", _REFUSED, "use /metrics at --http-port, or `kvkeep status`"),
    "extra-logging-interval": Theirs(_VALUE, "10", _REFUSED, "use /metrics at --http-port, or `kvkeep status`"),
    "trace-level": Theirs(_VALUE, "", _REFUSED, _DEBUG),
    "trace-output": Theirs(_VALUE, "", _REFUSED, _DEBUG),
}


class Word(NamedTuple):
    """A flag as it was typed."""

    name: str
    values: tuple[str, ...]
    typed: tuple[str, ...]  # the words that it is made of


def flags(argv: Sequence[str]) -> Iterator[Word | str]:
    """Flags of that server with their values, by its own rules, and every other word as it is."""
    at = 0
    while at < len(argv):
        first, at = argv[at], at + 1
        name, equals, value = first.removeprefix("--").partition("=")
        theirs = FLAGS.get(name)
        if theirs is None and name.startswith("no-") and FLAGS.get(name[3:], _NOTHING).kind is Kind.SWITCH:
            theirs = FLAGS[name[3:]]
        if not first.startswith("--") or theirs is None:
            yield first
            continue
        values = [value] if equals else []
        most = {Kind.VALUE: 1, Kind.REPEATED: 1, Kind.VALUES: len(argv)}.get(theirs.kind, 0)
        while not equals and len(values) < most and at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        yield Word(name, tuple(values), (first, *values) if not equals else (first,))


_NOTHING = Theirs(Kind.MARK, "", Verdict.REFUSED)


def without_no_ops(argv: Sequence[str]) -> tuple[list[str], list[Taken]]:
    """``argv`` without the flags that change nothing here, and those, each with the reason."""
    rest: list[str] = []
    taken: list[Taken] = []
    for word in flags(argv):
        if isinstance(word, str):
            rest.append(word)
        elif (why := _why_taken(word)) is not None:
            taken.append(Taken(f"--{word.name}", why))
        else:
            rest += word.typed
    return rest, taken


def _why_taken(word: Word) -> str | None:
    """None = it is one of kvkeepd's, or is refused."""
    theirs = FLAGS.get(word.name) or FLAGS[word.name.removeprefix("no-")]
    if theirs.verdict is Verdict.SAME:
        return None
    if theirs.kind is Kind.MARK or theirs.kind is Kind.SWITCH:
        value = "false" if word.name not in FLAGS else "true"
        if word.values:  # the real parser takes none either
            return None
    elif theirs.kind is not Kind.VALUES and not word.values:
        return None
    else:
        value = " ".join(word.values)
    if theirs.verdict is Verdict.TAKEN:
        return theirs.why
    fine = (theirs.default,) if theirs.fine is None else theirs.fine
    return _FINE if any(_equal(value, one) for one in fine) else None


def _equal(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


def instead(name: str) -> str | None:
    """What to use instead of LMCache's option ``name`` (without dashes in front), or None when LMCache has no such."""
    name = name.replace("_", "-")
    theirs = FLAGS.get(name) or FLAGS.get(name.removeprefix("no-"))
    if theirs is None or theirs.verdict is Verdict.SAME:
        return None
    return theirs.why if theirs.verdict is Verdict.REFUSED else f"leave it out: {theirs.why}"
