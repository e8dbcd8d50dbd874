"""What ``vllm serve`` runs: an HTTP frontend, and engine cores in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.conftest import Daemon
from tests.vllm.engines import START_S, shared_memory_of

NAME = "tiny"
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


class ApiServer:
    """Starts at once; `ready` waits.  `kill` is SIGKILL of all its processes."""

    def __init__(self, log: Path, model: Path, daemon: Daemon, *flags: str) -> None:
        self.log, self.port = log, free_port()
        options = {"kvkeep.run_dir": str(daemon.run_dir), "kvkeep.chunk_tokens": 64, "kvkeep.min_hit": 0}
        options |= {"kvkeep.lookup_deadline_ms": 10_000, "kvkeep.transfer_deadline_s": 30.0}
        transfer = {
            "kv_connector": "KVKeepConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": options,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"]
        command += ["--max-num-seqs", "16", "--seed", "0", "--kv-transfer-config", json.dumps(transfer), *flags]
        variables = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_RPC_BASE_PATH": str(log.parent)}
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True)

    def ready(self) -> ApiServer:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self._get("/health")
                return self
            time.sleep(0.1)
        raise AssertionError(f"no API server; its log:\n{self.tail()}")

    def complete(self, prompt: list[int], *, rank: int | None = None, **more: Any) -> dict[str, Any]:
        """The answer as engine_host.Host.generate gives it.  ``rank``: of data parallelism.  Raises OSError."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}
        body |= {"return_tokens_as_token_ids": True} | more
        headers = {"Content-Type": "application/json"} | (
            {"X-data-parallel-rank": str(rank)} if rank is not None else {}
        )
        request = urllib.request.Request(self._url("/v1/completions"), json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode()}; the server's log:\n{self.tail()}") from None
        (choice,) = answer["choices"]
        best = [sorted(step.values(), reverse=True) for step in choice["logprobs"]["top_logprobs"]]
        return {
            "tokens": [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "margins": [step[0] - step[1] for step in best],
            "finish": choice["finish_reason"],
            "cached": (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        }

    def metric(self, name: str, **labels: str) -> int:
        """Sum of all series of that name with these labels; 0 if there is none yet."""
        total = 0.0
        for line in self._get("/metrics").splitlines():
            found = SAMPLE.match(line)
            if found and found[1] == name and labels.items() <= dict(LABEL.findall(found[2] or "")).items():
                total += float(found[3])
        return round(total)

    def external_hits(self, **labels: str) -> int:
        return self.metric("vllm:external_prefix_cache_hits_total", **labels)

    def kill(self) -> None:
        left = shared_memory_of(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        for path in left:
            path.unlink(missing_ok=True)

    def tail(self, size: int = 6000) -> str:
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._url(path), timeout=30) as reply:
            text: str = reply.read().decode()
            return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
