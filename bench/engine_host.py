"""A vLLM engine in a process of its own, driven by lines of JSON.  engine_process.py starts it.

Reads one command a line from stdin, ``{"do": "ask", ...}``, and answers with one line on the descriptor that the
settings name (stdout belongs to vLLM's log).  It is the same for an engine with kvkeep, with LMCache and with no
connector; only ``kv_transfer_config`` differs.

The engine core runs in this process, so that the connector's scheduler half can be watched.  `Host.run` steps it as
vLLM's own process for it does, the millisecond of sleep after a step without a forward included: without it a waiting
engine would keep the interpreter from the connector's threads.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

WAIT_S = 120.0  # for what a connector still has to do after the answers
PAUSE_S = 0.001  # vLLM's EngineCoreProc, after a step that executed nothing
HITS = "vllm:external_prefix_cache_hits"
PREEMPTIONS = "vllm:num_preemptions"
SCHEDULER_METHODS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "get_kv_connector_stats",
    "take_events",
)


def serve() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(settings["answers"], "w")
    try:
        host = Host(settings["engine"], watched=settings["watched"])
        print(json.dumps({"ready": True}), file=answers, flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(host, command.pop("do"))(**command)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


class Host:
    def __init__(self, engine: dict[str, Any], *, watched: bool) -> None:
        guard_kernel_scan()
        self.sent = Sent()
        from vllm import LLM

        self.llm = LLM(**engine)
        self.watch = Watch()
        self.executed = False
        self._asked = 0
        if watched:  # the engine core is in this process
            self.engine: Any = self.llm.llm_engine
            self.core: Any = self.engine.engine_core.engine_core
            self.core.step_fn = self._step_of(self.core.step_fn)
            if self.core.scheduler.connector is not None:
                self.watch.wrap(self.core.scheduler.connector)

    def ask(self, prompts: list[list[int]], together: bool) -> dict[str, Any]:
        """Answer the prompts, one by one or all at once, from an engine that has nothing cached itself.

        -> ``seconds`` until the last answer, ``stored_s`` until the connector had nothing left to do, ``answers`` (for
        each prompt the two best first tokens and their logprobs), ``hits`` (tokens, by vLLM's counter of the external
        cache), ``preemptions``, and ``connector``: seconds and calls in its scheduler half until the last answer.
        """
        self.finish()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM would not reset its prefix cache: a block is in use")
        before = self.metrics()
        self.watch.clear()
        began = time.perf_counter()
        answers = [answer for some in ([prompts] if together else [[p] for p in prompts]) for answer in self.run(some)]
        seconds = time.perf_counter() - began
        watched = self.watch.total()
        self.finish()
        stored = time.perf_counter() - began
        after = self.metrics()
        return {
            "seconds": seconds,
            "stored_s": stored,
            "answers": answers,
            "hits": after.get(HITS, 0) - before.get(HITS, 0),
            "preemptions": after.get(PREEMPTIONS, 0) - before.get(PREEMPTIONS, 0),
            "connector": watched,
        }

    def run(self, prompts: list[list[int]], tokens: int = 1) -> list[list[Any]]:
        found: dict[str, list[Any]] = {}
        names = [self.add(prompt, tokens) for prompt in prompts]
        while len(found) < len(names):
            for output in self.step():
                if output.finished:
                    best = (output.outputs[0].logprobs or [{}])[0]
                    pairs = sorted(((entry.logprob, token) for token, entry in best.items()), reverse=True)[:2]
                    found[output.request_id] = [[token, logprob] for logprob, token in pairs]
        return [found[name] for name in names]

    def add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self._asked += 1
        name = f"bench-{self._asked}"
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> list[Any]:
        outputs: list[Any] = self.engine.step()
        if not self.executed and self.core.scheduler.has_requests():
            time.sleep(PAUSE_S)
        return outputs

    def finish(self) -> None:
        """Step until nothing is left to store, to report or to free."""
        until = time.monotonic() + WAIT_S
        scheduler = self.core.scheduler
        while scheduler.has_requests() or scheduler.requests:
            if time.monotonic() > until:
                raise RuntimeError(f"the connector was not done {WAIT_S:g} s after the answers")
            self.step()

    def decode(self, prompt: list[int], steps: int) -> dict[str, int]:
        """Messages that leave this process during so many steps of one request that only decodes.

        The steps begin when the prompt is computed and, as far as that can be seen, stored.
        """
        before = self.sent.snapshot()
        self.add(prompt, steps + 24)
        produced = 0
        while produced < 8:
            produced += len(self.step())
        time.sleep(0.3)  # the stores of the prompt, in the connector's threads
        for _ in range(8):
            self.step()
        decoding = self.sent.snapshot()
        for _ in range(steps):
            self.step()
        after = self.sent.snapshot()
        self.finish()
        return {
            "prefill": decoding.messages - before.messages,
            "messages": after.messages - decoding.messages,
            "pings": after.pings - decoding.pings,
        }

    def generate(self, prompt: list[int]) -> bool:
        """For an engine whose core is in a process of its own."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return True

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found

    def _step_of(self, step: Callable[[], tuple[Any, bool]]) -> Callable[[], tuple[Any, bool]]:
        def run() -> tuple[Any, bool]:
            outputs, self.executed = step()
            return outputs, self.executed

        return run


class Watch:
    """Time that the scheduler's thread spends in the scheduler half of a connector, by the clock and of the CPU."""

    def __init__(self) -> None:
        self._inside = False
        self.clear()

    def clear(self) -> None:
        self._wall_s = self._cpu_s = self._longest_s = 0.0
        self._calls = 0

    def total(self) -> dict[str, float]:
        return {"wall_s": self._wall_s, "cpu_s": self._cpu_s, "longest_s": self._longest_s, "calls": self._calls}

    def wrap(self, connector: Any) -> None:
        for name in SCHEDULER_METHODS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one of its methods calls another
                return method(*args, **kwargs)
            self._inside = True
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.perf_counter() - wall
                self._cpu_s += time.thread_time() - cpu
                self._wall_s += took
                self._longest_s = max(self._longest_s, took)
                self._calls += 1
                self._inside = False

        return run


class Count:
    def __init__(self, messages: int, pings: int) -> None:
        self.messages, self.pings = messages, pings


class Sent:
    """Messages that this process sends on DEALER sockets: both connectors talk to their servers on such."""

    def __init__(self) -> None:
        import zmq

        self._messages = self._pings = 0
        send = zmq.Socket.send

        def counted(socket: Any, data: Any, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
            if socket.socket_type == zmq.DEALER:
                if not flags & zmq.SNDMORE:
                    self._messages += 1
                self._pings += is_ping(bytes(memoryview(data)[:8]), bool(flags & zmq.SNDMORE))
            return send(socket, data, flags, *args, **kwargs)

        zmq.Socket.send = counted  # type: ignore[method-assign, assignment]

    def snapshot(self) -> Count:
        return Count(self._messages, self._pings)


LMCACHE_PING = b"\x16"  # its operation 22, the second frame


def is_ping(frame: bytes, more_follow: bool) -> bool:
    """Whether this is the frame that says that a message is a ping, of either: they are sent by the clock."""
    return frame == LMCACHE_PING if more_follow else frame[2:6] == b"PING"


def guard_kernel_scan() -> None:
    """vLLM's scan of all modules for Triton kernels takes ``vars(value)`` for a dict; with lmcache imported there are
    objects (llvmlite's library wrapper) that make up any attribute, ``__dict__`` too, and the engine does not start."""
    from vllm.triton_utils import dispatcher

    def only_mappings(value: Any) -> Any:
        found = builtins.vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = only_mappings


if __name__ == "__main__":
    serve()
