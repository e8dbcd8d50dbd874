"""A vLLM engine in a process of its own, driven by lines of JSON: ``python engine_host.py SETTINGS``.

Reads one request per line from stdin, ``{"do": "generate", ...}``, and answers with one line on the descriptor named in
the settings (stdout belongs to vLLM's log).  With ``multiprocessing`` off, scheduler, worker and connector live in this
process, so that `report` can look into them and `faults` can stand between the connector and the daemon.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


ENTRY_POINTS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
)


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if settings.get("multiprocessing") else "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    answers = os.fdopen(settings["answers"], "w")
    host = Host(settings)
    print(json.dumps({"ready": True, "start_s": host.start_s}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(host, request.pop("do"))(**request)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        if answer == "bye":
            break
    os._exit(0)


class Host:
    def __init__(self, settings: dict[str, Any]) -> None:
        began = time.monotonic()
        if settings.get("connector", True):
            import faults

            from kvkeep.ipc.vllm import clients

            if "fake" in settings:
                import fake_client

                self.daemon = fake_client.FakeDaemon(**settings["fake"])
                clients.attach = self.daemon.attach
            self.faults = faults.Faults(clients.attach)
            clients.attach = self.faults.attach
            if "skew" in settings:
                self.speak(**settings["skew"])
        if settings.get("connector_class", {}).get("kv_connector", "").startswith("LMCache"):
            from kvkeep.bench.engine_host import guard_kernel_scan

            guard_kernel_scan()
        from vllm import LLM

        self.ranks = settings.get("engine", {}).get("tensor_parallel_size", 1)
        options = {
            "model": settings["model"],
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        if settings.get("connector", True):
            options["kv_transfer_config"] = {
                "kv_connector": "KVKeepConnector",
                **settings.get("connector_class", {}),
                "kv_role": "kv_both",
                "kv_load_failure_policy": settings.get("policy", "recompute"),
                "kv_connector_extra_config": {"kvkeep.chunk_tokens": 64, "kvkeep.min_hit": 0}
                | settings.get("options", {}),
            }
        self.llm = LLM(**options | settings.get("engine", {}))
        self.start_s = time.monotonic() - began
        self.longest: dict[str, float] = {}  # seconds of the longest call of each entry point of the connector
        self.payloads = 0  # connector stats that went to vLLM's loggers
        self.busy_s = 0.0  # processor time that the engine's thread spent in the connector
        self.most_tokens = 0  # of a step, as the engine was started
        self.book: Any = None  # see ledger
        if settings.get("connector", True) and not settings.get("multiprocessing"):
            from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

            core = self.llm.llm_engine.engine_core.engine_core
            core.scheduler.connector.get_kv_connector_stats = self.counted(
                core.scheduler.connector.get_kv_connector_stats
            )
            here = (get_kv_transfer_group(),) if has_kv_transfer_group() else ()  # else each rank has its process
            for connector in (core.scheduler.connector, *here):
                for name in ENTRY_POINTS:
                    setattr(connector, name, self.timed(name, getattr(connector, name)))

    def counted(self, take_stats: Any) -> Any:
        def run() -> Any:
            stats = take_stats()
            self.payloads += stats is not None
            return stats

        return run

    def timed(self, name: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began, busy = time.monotonic(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.busy_s += time.thread_time() - busy
                self.longest[name] = max(self.longest.get(name, 0.0), time.monotonic() - began)

        return run

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salts: list[str] | None = None,
        logprobs: int = 2,
        adapter: tuple[str, int, str] | None = None,
        wishes: dict[str, Any] | None = None,
        images: list[int] | None = None,
        image_names: list[str] | None = None,
    ) -> dict[str, Any]:
        """``adapter``: name, id and path of a LoRA adapter; ``wishes``: kv_transfer_params; ``images``: seeds of an
        image for each prompt; ``image_names``: what the user calls them."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
        params.extra_args = {"kv_transfer_params": wishes} if wishes is not None else None
        lora = LoRARequest(*adapter) if adapter is not None else None
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for one, salt in zip(inputs, salts or [], strict=False):
            one["cache_salt"] = salt
        for one, image in zip(inputs, images or [], strict=False):
            one["multi_modal_data"] = {"image": _image(image)}
        for one, name in zip(inputs, image_names or [], strict=False):
            one["multi_modal_uuids"] = {"image": [name]}
        began = time.monotonic()
        outputs = self.llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
        seconds = time.monotonic() - began
        return {"answers": [_answer(output) for output in outputs], "seconds": seconds}

    def generate_and_abort(
        self, prompts: list[list[int]], aborts: list[int | None], max_tokens: int = 8, preempt: int = 0
    ) -> list[dict[str, Any] | None]:
        """All at once; ``aborts``: after how many steps each is aborted, None = never.  No answer of an aborted one.
        ``preempt``: so many times make the engine preempt one of two running requests."""
        from vllm import SamplingParams

        engine, base = self.llm.llm_engine, time.monotonic_ns()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        names = [f"{base}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        found: dict[str, dict[str, Any]] = {}
        step = 0
        while engine.has_unfinished_requests():
            preempt = self.scarcity.tighten(preempt)
            engine.abort_request([name for name, after in zip(names, aborts, strict=True) if after == step])
            found |= {output.request_id: _answer(output) for output in engine.step() if output.finished}
            step += 1
        self.scarcity.loosen()
        core = engine.engine_core.engine_core
        until = time.monotonic() + 10
        while core.scheduler.has_requests() and time.monotonic() < until:  # loads of aborted requests end, too
            engine.step()
            time.sleep(0.001)
        return [found.get(name) for name in names]

    def groups(self) -> int:
        return len(self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)

    def leave_blocks(self, count: int) -> bool:
        self.scarcity.leave(count)
        return True

    @functools.cached_property
    def scarcity(self) -> Any:
        import scarcity

        return scarcity.Scarcity(self.llm.llm_engine.engine_core.engine_core.scheduler)

    def step_tokens(self, count: int) -> bool:
        """Compute at most so many tokens a step, so that prompts are computed in pieces.  0 = as it was started."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.most_tokens = self.most_tokens or scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = count or self.most_tokens
        return True

    def ledger(self) -> dict[str, int]:
        """See ledger.Ledger; it counts from the first call on."""
        if self.book is None:
            import ledger

            self.book = ledger.Ledger(self.llm.llm_engine.engine_core.engine_core.scheduler)
        return {"served": self.book.served, "promised": self.book.promised, "unseen": self.book.unseen()}

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found

    def series(self) -> list[tuple[str, dict[str, str], float]]:
        """Everything of vLLM and of ours in this process' Prometheus registry: name, labels, value."""
        from prometheus_client import REGISTRY

        families = [family for family in REGISTRY.collect() if family.name.startswith("vllm:")]
        return [(one.name, one.labels, one.value) for family in families for one in family.samples]

    def log_stats(self) -> bool:
        """What vLLM does every ten seconds."""
        self.llm.llm_engine.do_log_stats()
        return True

    def settle(self, deadline_s: float = 10.0) -> dict[str, Any]:
        """Step the engine until its stores are reported; in process nobody does that for an idle engine."""
        core = self.llm.llm_engine.engine_core.engine_core
        until = time.monotonic() + deadline_s
        while core.scheduler.connector.has_pending_push_work() and time.monotonic() < until:
            self.llm.llm_engine.step()  # not the core's: vLLM's loggers get their statistics here
            time.sleep(0.002)
        return self.report()

    def forget_local(self) -> bool:
        """Empty the engine's own prefix cache, so that what is hit comes from outside."""
        self.settle()
        return bool(self.llm.reset_prefix_cache())

    def reset_prefix_cache(self) -> bool:
        """False while a block is in use or pinned."""
        return bool(self.llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        self.settle()
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def report(self) -> dict[str, Any]:
        core = self.llm.llm_engine.engine_core.engine_core
        scheduler = _ours(core.scheduler.connector)
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        worker = _ours(get_kv_transfer_group()) if has_kv_transfer_group() else None
        pool = core.scheduler.kv_cache_manager.block_pool
        half, other = scheduler.scheduler, worker.worker if worker is not None else None
        noted = dict(worker.guard.counters) if worker is not None else {}
        answer: dict[str, Any] = {
            "on": half is not None and half.active() is not None,
            "guard": dict(scheduler.guard.counters) | noted,
            "blocks": pool.num_gpu_blocks,
            "free_blocks": pool.get_num_free_blocks(),
            "sent": dict(self.faults.sent),
            "payloads": self.payloads,
            "busy_ms": round(self.busy_s * 1000, 3),
            "longest_ms": {name: round(seconds * 1000, 2) for name, seconds in self.longest.items()},
        }
        if half is not None and half.lookups is not None:
            answer |= {
                "counters": dict(half.counters),
                "copies": dict(other.copies.counters) if other is not None else {},
                "held": half.lookups.held(),
                "pinned": half.stores.pinned_blocks,
            }
        if hasattr(self, "daemon"):
            answer |= {"messages": dict(self.daemon.messages), "references": self.daemon.references()}
            answer["stored"] = self.daemon.stored()
        return answer

    def fault(self, **settings: Any) -> bool:
        """See faults.Faults; ``daemon_up`` and the like reach the fake daemon."""
        for name, value in settings.items():
            target = self.faults if hasattr(self.faults, name) else self.daemon
            setattr(target, name, value)
        return True

    def speak(self, **versions: Any) -> bool:
        """See skew.client."""
        import skew

        skew.client(**versions)
        return True

    def preemptions(self) -> int:
        return int(self.metrics().get("vllm:num_preemptions", 0))

    def abort_while_loading(self, prompt: list[int], after_steps: int) -> dict[str, Any]:
        """Add a request, step the engine a few times, abort it, and run on until nothing is left."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        name = f"aborted-{time.monotonic_ns()}"
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=64))
        for _ in range(after_steps):
            engine.step()
        engine.abort_request([name])
        core = engine.engine_core.engine_core
        until = time.monotonic() + 10
        while core.scheduler.has_requests() and time.monotonic() < until:
            core.step_fn()
            time.sleep(0.001)
        return self.report() | {"requests": len(core.scheduler.requests)}

    def quit(self) -> str:
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1" or self.ranks > 1:
            self.llm.llm_engine.engine_core.shutdown()  # ends its processes, and unlinks their shared memory
        return "bye"


def _image(seed: int) -> Any:
    import numpy as np
    import tiny_model
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (tiny_model.IMAGE_SIDE,) * 2 + (3,), np.uint8)
    return Image.fromarray(pixels)


def _answer(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    steps = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in best.logprobs or []]
    chosen = [step[token].logprob for step, token in zip(best.logprobs or [], best.token_ids, strict=False)]
    margins = [step[0] - step[1] for step in steps]
    return {"tokens": list(best.token_ids), "logprobs": chosen, "margins": margins, "finish": best.finish_reason}


def _ours(connector: Any) -> Any:
    """KVKeepConnector, also where MultiConnector is around it."""
    inside = getattr(connector, "_connectors", ())
    return next((one for one in inside if hasattr(one, "guard")), connector)


if __name__ == "__main__":
    main()
