"""`bench engine` without an engine: when a time counts, who is asked first, and what is printed if it does not count.

The engines themselves are in tests/vllm/test_bench_engine.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvkeep.bench import engine
from kvkeep.bench.common import Report
from kvkeep.bench.engine_calm import Used
from kvkeep.bench.engine_host import LMCACHE_PING, Watch, is_ping
from kvkeep.bench.engine_process import KVKEEP, LMCACHE, NONE
from kvkeep.bench.engine_rounds import Figures, Load, turns, wrong
from kvkeep.ipc import messages

LOAD = Load(512, 2, 2, warm_up=0)
TRUTH = [[[7, -0.5], [9, -2.0]], [[8, -0.7], [3, -0.7001]]]


def answer(hits: float = 0, seconds: float = 1.0, **changed: Any) -> dict[str, Any]:
    spent = {"wall_s": 0.002, "cpu_s": 0.001, "longest_s": 0.0005, "calls": 10}
    whole = {"seconds": seconds, "stored_s": seconds, "answers": TRUTH, "hits": hits, "preemptions": 0}
    return whole | {"connector": spent} | changed


def figures(*hits_of_kvkeep: float) -> Figures:
    found = Figures(LOAD)
    for number, hits in enumerate(hits_of_kvkeep, 1):
        miss = {who: answer(seconds=number) for who in (NONE, KVKEEP, LMCACHE)}
        hit = {KVKEEP: answer(hits, 0.2 * number), LMCACHE: answer(1022, number)}
        together = {NONE: answer(), KVKEEP: answer(1024), LMCACHE: answer(1022)}
        found.add({"miss": miss, "hit": hit, "together": together})
    return found


@pytest.mark.parametrize("hits", [1022, 1024])
def test_a_hit_counts_when_all_or_all_but_the_last_tokens_came_from_the_cache(hits: int) -> None:
    assert wrong("hit", KVKEEP, LOAD, answer(hits), TRUTH) == ""


@pytest.mark.parametrize("hits", [0, 512, 1021, 1025])
def test_a_hit_of_another_size_is_named(hits: int) -> None:
    assert (
        wrong("hit", KVKEEP, LOAD, answer(hits), TRUTH) == f"{hits} tokens came from the external cache instead of 1024"
    )


@pytest.mark.parametrize("who", [KVKEEP, NONE])
def test_a_miss_that_hit_does_not_count(who: str) -> None:
    assert wrong("miss", who, LOAD, answer(0), TRUTH) == ""
    assert "instead of 0" in wrong("miss", who, LOAD, answer(256), TRUTH)


def test_another_answer_does_not_count() -> None:
    other = [[[7, -0.51], [9, -2.0]], TRUTH[1]]
    assert "prompt 0" in wrong("miss", KVKEEP, LOAD, answer(answers=other), TRUTH)
    other = [TRUTH[0], [[5, -0.7], [3, -0.9]]]
    assert "prompt 1" in wrong("miss", KVKEEP, LOAD, answer(answers=other), TRUTH)


def test_of_two_tokens_that_are_as_good_either_may_win() -> None:
    swapped = [TRUTH[0], [TRUTH[1][1], TRUTH[1][0]]]
    assert wrong("miss", KVKEEP, LOAD, answer(answers=swapped), TRUTH) == ""


def test_a_preemption_does_not_count() -> None:
    assert "preempted" in wrong("hit", KVKEEP, LOAD, answer(1024, preemptions=1), TRUTH)


def test_each_engine_is_first_in_turn() -> None:
    assert [list(turns(["a", "b", "c"], number)) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def shown(found: Figures, capsys: pytest.CaptureFixture[str], only: str = "") -> tuple[Report, dict[str, Any]]:
    args = argparse.Namespace(json=True, seed=1, only=only)
    report = Report(args, "")
    engine.show(report, args, found, "lmcache 0.5.6")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return report, {line["case"]: line for line in lines}


def test_a_case_is_the_ratio_of_the_medians_with_the_ratios_of_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    found = Figures(Load(512, 1, 3, warm_up=0))
    one = [TRUTH[0]]
    for ours, theirs in ((1.0, 2.0), (3.0, 3.0), (4.0, 2.0)):
        miss = {who: answer(0, s, answers=one) for who, s in ((KVKEEP, ours), (NONE, theirs), (LMCACHE, 9.0))}
        hit = {who: answer(512, 0.5, answers=one) for who in (KVKEEP, LMCACHE)}
        found.add({"miss": miss, "hit": hit})
    _, lines = shown(found, capsys)
    line = lines["miss/512"]
    assert (line["value"], line["reference"], line["ratio"], line["ok"]) == (3.0, 2.0, 1.5, False)
    assert (line["low"], line["high"]) == (0.6, 1.8)
    assert lines["hit/512"]["reference"] == 2.0  # no cache: what it took to compute them
    assert lines["scheduler/hit/512"]["value"] == 2.0


def test_each_set_of_engines_has_a_ratio_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = Figures(Load(512, 1, 3, warm_up=0))
    one = [TRUTH[0]]
    for start, ours, theirs in ((0, 1.0, 2.0), (0, 3.0, 4.0), (1, 3.0, 2.0)):
        miss = {who: answer(0, s, answers=one) for who, s in ((KVKEEP, ours), (NONE, theirs), (LMCACHE, 2.0))}
        hit = {who: answer(512, 0.5, answers=one) for who in (KVKEEP, LMCACHE)}
        found.add({"miss": miss, "hit": hit}, start=start)
    _, lines = shown(found, capsys)
    assert lines["miss/512"]["starts"] == [0.667, 1.5]
    assert lines["miss/512/lmcache"]["starts"] == [1.0, 1.5]


def test_figures_that_say_nothing_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    report, lines = shown(figures(1024, 512), capsys)
    assert report.failures == 3
    for name in ("hit/512", "hit/512/lmcache", "scheduler/hit/512"):
        assert lines[name]["value"] is None
        assert lines[name]["failed"] == "kvkeep: 512 tokens came from the external cache instead of 1024"
    assert lines["miss/512"]["ratio"] == 1.0


def test_a_disturbed_round_does_not_count_but_what_is_wrong_in_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    found, disturbed = figures(1024), figures(512)
    found.add({"miss": {NONE: answer(seconds=9), KVKEEP: answer(256, 9)}}, 80.0, counts=False)
    assert (list(found.values("miss", KVKEEP)), found.others) == ([1.0], [0.0])
    assert "256 tokens" in found.problem("miss", KVKEEP)
    assert disturbed.problem("miss", KVKEEP) == ""


BURN = "import time\nwhile time.process_time() < 0.6: pass\n"


def test_what_our_own_processes_use_is_told_apart() -> None:
    before = Used.now()
    subprocess.run([sys.executable, "-c", BURN], check=True, timeout=120)
    after = Used.now()
    assert after.ours - before.ours > 0.5
    assert after.machine - before.machine > 0.5


def test_what_another_process_uses_is_not_ours(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{BURN}open({str(done)!r}, 'w').close()\n"
    before = Used.now()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)  # what it leaves is nobody's child any more
    until = time.monotonic() + 120
    while not done.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    after = Used.now()
    assert after.machine - before.machine > 0.5
    assert after.ours - before.ours < 0.5


def test_only_the_cases_asked_for_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(shown(figures(1024), capsys, "hit/512/lm")[1]) == {"hit/512/lmcache"}


def test_the_time_in_a_method_that_another_calls_counts_once() -> None:
    class Connector:
        def request_finished(self) -> int:
            return 1

        def request_finished_all_groups(self) -> int:
            return self.request_finished() + 1

    connector, watch = Connector(), Watch()
    watch.wrap(connector)
    assert (connector.request_finished_all_groups(), connector.request_finished()) == (2, 1)
    total = watch.total()
    assert total["calls"] == 2
    assert total["wall_s"] >= total["longest_s"] > 0


def test_pings_are_told_apart() -> None:
    assert is_ping(messages.encode(messages.Ping(1, 1)), False)
    assert is_ping(LMCACHE_PING, True)
    assert not is_ping(messages.encode(messages.Stats(1, 1)), False)
    assert not is_ping(b"\x08", True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_it_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "kvkeep.daemon.cli", "bench", "engine", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert (line["case"], line["not_measured"]) == ("engine", "vllm is not installed here")
