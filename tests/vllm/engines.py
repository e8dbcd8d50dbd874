"""Starts engine_host.py and talks to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S, ANSWER_S = 180.0, 120.0


class Engine:
    """One engine process.  A context manager; the process is gone afterwards, whatever happened."""

    def __init__(self, log: Path, model: Path, *, environment: dict[str, str] | None = None, **settings: Any) -> None:
        self.log = log
        ours, theirs = os.pipe()
        os.set_inheritable(theirs, True)
        settings |= {"model": str(model), "answers": theirs}
        command = [sys.executable, str(HERE / "engine_host.py"), json.dumps(settings)]
        variables = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | (environment or {})
        variables["VLLM_RPC_BASE_PATH"] = str(log.parent)  # vLLM's own sockets
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[theirs],
                env=variables,
                start_new_session=True,  # vLLM's processes, if it starts some, end with it
            )
        os.close(theirs)
        self._answers = os.fdopen(ours, "rb", buffering=0)
        self._rest = b""

    def ready(self, wait_s: float = START_S) -> Engine:
        self._answer(wait_s)
        return self

    def ask(self, do: str, *, wait_s: float = ANSWER_S, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self._answer(wait_s)

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, wait_s: float = ANSWER_S) -> Any:
        return self._answer(wait_s)

    def generate(self, prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.ask("generate", prompts=prompts, **arguments)["answers"]
        return answers

    def external_hits(self) -> int:
        return int(self.ask("metrics").get("vllm:external_prefix_cache_hits", 0))

    def close(self) -> None:
        left = shared_memory_of(self.process.pid)
        try:
            if self.process.poll() is None:
                self.send("quit")
                self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._answers.close()
            for path in left:
                path.unlink(missing_ok=True)

    def __enter__(self) -> Engine:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, wait_s: float) -> Any:
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._answers], [], [], wait_s)
            data = os.read(self._answers.fileno(), 1 << 20) if readable else b""
            if not data:
                what = "ended" if readable else f"said nothing for {wait_s} s"
                raise AssertionError(f"the engine {what}; its log:\n{self.tail()}")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{answer['error']}; the engine's log:\n{self.tail()}")
        return answer

    def tail(self, size: int = 6000) -> str:
        return self.log.read_bytes()[-size:].decode(errors="replace")


def shared_memory_of(group: int) -> list[Path]:
    """What vLLM's processes of this group have in /dev/shm: when they are killed nobody unlinks it, and some of it not
    even at their orderly end.  By inode: a semaphore is mapped under a name that it had before."""
    mapped: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                mapped.update(line.split()[4] for line in (process / "maps").read_text().splitlines())
    kinds = ("psm_*", "sem.mp-*", "vllm_dist_*")
    found = [path for kind in kinds for path in Path("/dev/shm").glob(kind)]
    return [path for path in found if inode(path) in mapped]


def inode(path: Path) -> str:
    try:
        return str(path.stat().st_ino)
    except OSError:  # it has gone meanwhile
        return ""
