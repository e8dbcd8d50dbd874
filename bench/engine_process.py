"""The processes of `bench engine`: engines that answer one at a time, and LMCache's server.

Each `Engine` is one subprocess (engine_host.py) that stays alive between rounds and sleeps on its pipe while another is
asked.  All are started the same way, by the interpreter given, with the same vLLM settings; only ``kv_transfer_config``
differs.  Everything is a context manager and leaves no process, no segment and no file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvkeep.bench import engine_model
from kvkeep.bench.common import BenchError
from kvkeep.bench.engine_calm import descendants

START_S = 300.0  # of an engine, three of which may start at once
ANSWER_S = 600.0
SERVER_START_S = 120.0
STOP_S, KILL_S = 10.0, 60.0
BLOCK_TOKENS = 32
STEP_TOKENS = 2048  # chunked prefill: so many tokens a step, at most
POOL_BYTES = 288 << 20  # an engine's KV: twice the longest prompt; stores in flight hold a quarter of it at most
HOST = Path(__file__).with_name("engine_host.py")
MODEL = Path(__file__).with_name("engine_model.py")
# An engine ends when its pipe does.  A server that nobody takes away ends by PR_SET_PDEATHSIG, which outlives the exec.
DIES_WITH_US = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

KVKEEP, LMCACHE, NONE = "kvkeep", "lmcache", "none"


def script(file: Path) -> tuple[str, str]:
    """Runs it without its folder on the path, whose names are not meant to be found there; kvkeep need not be installed
    for the interpreter."""
    return "-c", f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"


def has_module(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], cwd="/", capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{python} does not run: {error}") from None


def version_of(python: str, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    run = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, timeout=60)
    return run.stdout.strip() or "unknown"


def write_model(folder: Path) -> Path:
    run = subprocess.run(
        [sys.executable, *script(MODEL), str(folder)],
        cwd="/",
        env=os.environ | {"TMPDIR": str(folder.parent)},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    if run.returncode != 0:
        raise BenchError(f"the model could not be written: {run.stderr.strip()[-500:]}")
    return folder


# For the form that measures nothing: no deadline passes on a machine that is busy, and no hit is declined.
PATIENT = {"kvkeep.lookup_deadline_ms": 30_000, "kvkeep.transfer_deadline_s": 60, "kvkeep.min_hit": 0}


def connector_of(who: str, where: str, patient: bool = False) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config.  ``where``: kvkeep's run directory, or the port of LMCache's server."""
    if who == NONE:
        return None
    extra: dict[str, Any]
    if who == KVKEEP:
        name, extra = "KVKeepConnector", {"kvkeep.run_dir": where} | (PATIENT if patient else {})
    else:
        name, extra = "LMCacheMPConnector", {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(where)}
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class Engine:
    """Context manager: one engine process.  `start` returns at once; the first `ready` waits for it."""

    def __init__(
        self,
        who: str,
        python: str,
        folder: Path,
        model: Path,
        where: str = "",
        *,
        own_process: bool = False,
        patient: bool = False,
    ) -> None:
        self.who = who
        self._log = folder / f"{who}{'-served' if own_process else ''}.log"
        ours, theirs = os.pipe()
        engine = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": engine_model.MAX_TOKENS,
            "max_num_seqs": 16,
            "max_num_batched_tokens": STEP_TOKENS,
            "kv_cache_memory_bytes": POOL_BYTES,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "skip_tokenizer_init": True,
            "seed": 0,
        }
        if (connector := connector_of(who, where, patient)) is not None:
            engine["kv_transfer_config"] = connector
        settings = {"answers": theirs, "engine": engine, "watched": not own_process}
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("KVKEEP_", "LMCACHE_"))}
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if own_process else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_RPC_BASE_PATH": str(folder),
            "TMPDIR": str(folder),  # vLLM leaves files there when it is killed
            "LMCACHE_TRACK_USAGE": "false",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, *script(HOST), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=variables,
                pass_fds=[theirs],
                start_new_session=True,
            )
        os.close(theirs)
        self._answers = os.fdopen(ours, "rb", buffering=0)
        self._rest = b""

    def ready(self) -> Engine:
        self._answer(START_S)
        return self

    def tell(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(f"the engine with {self.who} ended; its log: {self._tail()}") from None
        return self._answer(ANSWER_S)

    def cpu_s(self) -> float:
        """Of the CPU, by all processes of this engine so far."""
        return sum(map(cpu_of, descendants(self._process.pid)))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        gone(self._process)
        self._answers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, wait_s: float) -> Any:
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._answers], [], [], wait_s)
            data = os.read(self._answers.fileno(), 1 << 20) if readable else b""
            if not data:
                what = "ended" if readable else f"said nothing for {wait_s:g} s"
                raise BenchError(f"the engine with {self.who} {what}; its log: {self._tail()}")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise BenchError(f"the engine with {self.who}: {answer['error']}; its log: {self._tail()}")
        return answer

    def _tail(self) -> str:
        return self._log.read_bytes()[-3000:].decode(errors="replace")


class LMCacheServer:
    """Context manager: ``lmcache server``, engine_driven with shared memory, ready when it is entered."""

    def __init__(self, python: str, folder: Path, l1_bytes: int) -> None:
        self.port, http = free_ports(2)
        self._name = f"kvkeep-bench-{os.getpid()}"
        self._log = folder / "lmcache-server.log"
        self._url = f"http://127.0.0.1:{http}"
        command = [
            *(python, "-c", DIES_WITH_US, "-m", "lmcache.cli.main", "server"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http), "--supported-transfer-mode", "engine_driven"),
            *("--shm-name", self._name, "--no-l1-use-lazy", "--l1-size-gb", f"{l1_bytes / 2**30:.3f}"),
            *("--eviction-policy", "LRU", "--chunk-size", "256"),
        ]
        variables = {k: v for k, v in os.environ.items() if not k.startswith("LMCACHE_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=variables | {"LMCACHE_TRACK_USAGE": "false", "TMPDIR": str(folder)},
                start_new_session=True,
            )

    def ready(self) -> LMCacheServer:
        until = time.monotonic() + SERVER_START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"{self._url}/healthcheck", timeout=2),
            ):
                return self
            time.sleep(0.1)
        raise BenchError(f"lmcache server did not start: {self._log.read_bytes()[-2000:].decode(errors='replace')}")

    def must_run(self) -> None:
        if self._process.poll() is not None:
            raise BenchError(f"lmcache server ended: {self._log.read_bytes()[-2000:].decode(errors='replace')}")

    def clear(self) -> None:
        request = urllib.request.Request(f"{self._url}/cache/clear", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=STOP_S):
                pass
        except OSError as error:
            raise BenchError(f"lmcache server did not clear its cache: {error}") from None

    def uses_shared_memory(self) -> bool:
        """Without its segment it would send all KV through its socket, and say nothing."""
        return any(self._name in path.name for path in Path("/dev/shm").iterdir())

    def __enter__(self) -> LMCacheServer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        gone(self._process)
        for path in Path("/dev/shm").iterdir():
            if self._name in path.name:
                path.unlink(missing_ok=True)


def gone(killed: subprocess.Popen[bytes]) -> None:
    """Its memory takes a while on a machine that is busy; what does not end is the kernel's."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        killed.wait(KILL_S)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return total / 1e9
