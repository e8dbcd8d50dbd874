"""Far too little KV memory: requests are preempted, resumed and finished while their blocks are being stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Daemon
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64


@pytest.fixture(scope="module")
def cramped(make_engine: Callable[..., Engine], shared_daemon: Daemon) -> Engine:
    """40 blocks of 32 tokens."""
    settings = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    return make_engine(daemon=shared_daemon, engine=settings, options={"kvkeep.store_generated": True}).ready()


@pytest.mark.parametrize("slow_s", [0.0, 0.02])
def test_a_preemption_storm_changes_no_answer_and_stores_no_wrong_byte(
    cramped: Engine, reference: Engine, slow_s: float
) -> None:
    prompts = [prompt(100 + n + int(slow_s * 10000), 150 + 9 * n) for n in range(14)]
    wanted = reference.generate(prompts, max_tokens=100)
    before = cramped.ask("preemptions")
    cramped.ask("fault", slow_stores_s=slow_s, slow_loads_s=slow_s / 4)
    assert_same_outputs(cramped.generate(prompts, max_tokens=100), wanted)
    report = cramped.ask("settle")
    assert cramped.ask("preemptions") > before
    assert report["counters"]["chunks_stored"] > 0
    assert_nothing_held(report)

    # what was stored in the storm is compared with what is computed: the next turns are made from it
    cramped.ask("fault", slow_stores_s=0.0, slow_loads_s=0.0)
    turns = [one + answer["tokens"] for one, answer in zip(prompts, wanted, strict=True)]
    wanted = reference.generate(turns)
    hits = cramped.external_hits()
    for turn, answer in zip(turns, wanted, strict=True):
        assert cramped.ask("forget_local")
        assert_same_outputs(cramped.generate([turn]), [answer])
    assert cramped.external_hits() > hits
    assert cramped.ask("settle")["guard"] == {}


def test_pinned_blocks_are_capped_and_what_does_not_fit_is_counted(cramped: Engine, reference: Engine) -> None:
    long = [prompt(900, 900)]  # 28 blocks complete in one step; a quarter of 40 may be pinned
    wanted = reference.generate(long)
    cramped.ask("fault", slow_stores_s=0.3)
    assert_same_outputs(cramped.generate(long), wanted)
    assert cramped.ask("report")["counters"]["chunks_skipped_pins"] > 0
    cramped.ask("fault", slow_stores_s=0.0)
    assert_nothing_held(cramped.ask("settle"))
