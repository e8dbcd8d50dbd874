"""What an engine loses when its daemon is gone for good: python -m tests.vllm.measure_gone [ROUNDS] [SEED]

Two engines on the CPU answer the same prompts, in turns and in alternating order: one with the connector, whose daemon
was killed and not started again, one without any connector.  Prints both medians and their ratio.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import Daemon, unique_name
from tests.vllm import tiny_model
from tests.vllm.engines import Engine

PROMPTS, LENGTH, ANSWER = 8, 1200, 8


def main(rounds: int = 40, seed: int = 1) -> None:
    rng = random.Random(seed)

    def prompts() -> list[list[int]]:
        return [[rng.randrange(3, 500) for _ in range(LENGTH)] for _ in range(PROMPTS)]

    with tempfile.TemporaryDirectory(prefix="kvk-gone-") as folder:
        model = tiny_model.build(Path(folder) / "model")
        name = unique_name("gone")
        daemon = Daemon(Path(folder) / name, name, l1_mib=256).start()
        try:
            options = {"kvkeep.run_dir": str(daemon.run_dir)}
            with (
                Engine(Path(folder) / "kvkeep.log", model, options=options) as ours,
                Engine(Path(folder) / "plain.log", model, connector=False) as plain,
            ):
                for engine in (ours, plain):
                    engine.generate(prompts(), max_tokens=ANSWER)
                daemon.kill()
                time.sleep(2)
                times: dict[Engine, list[float]] = {ours: [], plain: []}
                for number in range(rounds):
                    asked = prompts()
                    for engine in (ours, plain) if number % 2 else (plain, ours):
                        began = time.perf_counter()
                        engine.generate(asked, max_tokens=ANSWER)
                        times[engine].append(time.perf_counter() - began)
        finally:
            daemon.remove()
    gone, without = (statistics.median(times[engine]) for engine in (ours, plain))
    print(f"{rounds} rounds of {PROMPTS} prompts of {LENGTH} tokens, seed {seed}")
    print(f"daemon gone {gone:.4f} s, no connector {without:.4f} s, ratio {gone / without:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
