"""The threshold, with made-up measurements.  A machine here computes and loads at speeds that a test sets."""

from __future__ import annotations

import random

import pytest

from kvkeep.ipc.vllm.pace import ENOUGH, STEP_TOKENS, WINDOW, Pace

SIZES = (256, 512, 1024, 2048, 4096)


class Machine:
    def __init__(self, *, load_base: float, load_slope: float, compute: float = 1e-4, growth: float = 0.0) -> None:
        self.now = 0.0
        self.pace = Pace(clock=lambda: self.now)
        self.load_base, self.load_slope = load_base, load_slope
        self.compute, self.growth = compute, growth

    def load_s(self, tokens: int) -> float:
        return self.load_base + self.load_slope * tokens

    def compute_s(self, tokens: int, context: int = 0) -> float:
        return tokens * (self.compute + self.growth * (context + tokens / 2))

    def computes(self, tokens: int, context: int = 0, *, slower: float = 1.0) -> None:
        number = self.pace.step_began([(tokens, context), (1, 50)])
        self.now += self.compute_s(tokens, context) * slower
        self.pace.step_ended(number)
        self.pace.output_seen()

    def loads(self, tokens: int, context: int = 0, *, seconds: float = 0.0, ok: bool = True) -> None:
        self.now += 0.001
        self.pace.load_ended(tokens, context, seconds or self.load_s(tokens), ok=ok)

    def learns(self, rounds: int = 2) -> Machine:
        for _ in range(rounds):
            for tokens in SIZES:
                self.computes(tokens)
                self.loads(tokens)
        return self

    def serve(self, tokens: int, context: int = 0) -> bool:
        """One hit: loaded if it is worth it, else computed."""
        worth = self.pace.worth(tokens, context)
        if worth:
            self.loads(tokens, context)
        else:
            self.computes(tokens, context)
        return worth


FAST = {"load_base": 0.002, "load_slope": 1e-6}
SLOW = {"load_base": 0.002, "load_slope": 3e-4}
FIXED = {"load_base": 0.060, "load_slope": 1e-6}  # computing 600 tokens takes as long


def test_everything_is_worth_it_until_both_are_measured() -> None:
    machine = Machine(**SLOW)
    for tokens in SIZES * 2:
        machine.loads(tokens)
    assert machine.pace.worth(256)
    for _ in range(ENOUGH - 1):
        machine.computes(1024)
    assert machine.pace.worth(256)
    machine.computes(1024)
    assert not machine.pace.worth(256)
    other = Machine(**SLOW)
    for _ in range(WINDOW):
        other.computes(1024)
    assert other.pace.worth(256)


def test_a_hit_is_worth_it_where_loading_is_faster_than_computing() -> None:
    assert all(Machine(**FAST).learns().pace.worth(tokens) for tokens in (64, *SIZES))
    assert not any(Machine(**SLOW).learns().pace.worth(tokens) for tokens in (64, *SIZES))
    machine = Machine(**FIXED).learns()
    assert [machine.pace.worth(tokens) for tokens in (64, 512, 550, 650, 1024)] == [False, False, False, True, True]


def test_with_random_speeds_the_answer_is_never_a_load_that_is_slower(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(200):
        machine = Machine(load_base=10 ** source.uniform(-4, -1), load_slope=10 ** source.uniform(-7, -3))
        machine.learns()
        tokens = source.randrange(64, 8192)
        load, compute = machine.load_s(tokens), machine.compute_s(tokens)
        if load > compute * 1.01:
            assert not machine.pace.worth(tokens), (tokens, load, compute)
        elif load < compute * 0.99:
            assert machine.pace.worth(tokens), (tokens, load, compute)


def test_tokens_after_a_long_context_are_dearer_to_compute() -> None:
    machine = Machine(load_base=0.0, load_slope=2e-4, growth=1e-7)
    for context in (0, 512, 1024, 2048, 4096):
        for tokens in (256, 512):
            machine.computes(tokens, context)
            machine.loads(tokens, context)
    assert not machine.pace.worth(256, 0)
    assert machine.pace.worth(256, 4096)
    assert machine.pace.worth(256, 16_384)


def test_loads_of_one_size_do_not_say_that_small_ones_are_cheap() -> None:
    machine = Machine(load_base=0.05, load_slope=0.0)
    for _ in range(ENOUGH):
        machine.loads(1024)
        machine.computes(1024)
    assert machine.pace.worth(1024)
    assert not machine.pace.worth(256)


@pytest.mark.parametrize("at", [0, 4, 9])
def test_a_step_that_compiles_does_not_make_computing_look_slow(at: int) -> None:
    machine = Machine(**SLOW)
    for number in range(10):
        machine.computes(SIZES[number % 5], slower=500.0 if number == at else 1.0)
        machine.loads(SIZES[number % 5])
    assert not machine.pace.worth(1024)


@pytest.mark.parametrize("ok", [True, False])
def test_a_load_that_hung_until_its_deadline_does_not_turn_loading_off(ok: bool) -> None:
    machine = Machine(**FAST).learns()
    for _ in range(2):
        machine.loads(1024, seconds=5.0, ok=ok)
        assert machine.pace.worth(1024)


def test_loads_that_all_hang_or_fail_turn_loading_off() -> None:
    for seconds in (5.0, 0.0001):  # an error that comes at once is not a fast load
        machine = Machine(**FAST).learns()
        for _ in range(WINDOW):
            machine.loads(1024, seconds=seconds, ok=False)
        assert not machine.pace.worth(1024)


def test_a_throttled_moment_changes_nothing_and_a_throttled_machine_does() -> None:
    machine = Machine(load_base=0.0, load_slope=2e-4)
    for _ in range(WINDOW):
        machine.computes(1024)
        machine.loads(1024)
    for _ in range(WINDOW // 4):
        machine.computes(1024, slower=4.0)
    assert not machine.pace.worth(1024)
    for _ in range(WINDOW):
        machine.computes(1024, slower=4.0)
    assert machine.pace.worth(1024)  # computing is the slower one now


def test_steps_of_few_tokens_tell_nothing() -> None:
    machine = Machine(**FAST)
    for pieces in ([(STEP_TOKENS - 1, 0)], [(1, 100)] * 256, []):
        assert machine.pace.step_began(pieces) == 0
    assert machine.pace.step_began([(STEP_TOKENS, 0)]) > 0


def test_steps_that_overlap_are_not_counted_twice() -> None:
    machine = Machine(load_base=0.0, load_slope=1.5e-4)
    numbers = [machine.pace.step_began([(1024, 0)])]
    for tokens in SIZES * 4:  # the next step begins before the output of this one is there
        numbers.append(machine.pace.step_began([(1024, 0)]))
        machine.now += machine.compute_s(1024)
        machine.pace.step_ended(numbers.pop(0))
        machine.pace.output_seen()
        machine.loads(tokens)
    assert not machine.pace.worth(1024)


def test_steps_whose_end_is_never_told_are_forgotten() -> None:
    machine = Machine(**FAST)
    for _ in range(1000):
        machine.pace.step_began([(1024, 0)])
    assert len(machine.pace._steps) < 10
    machine.pace.step_ended(1)
    machine.pace.step_ended(0)


# ---- trials ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [1.1e-4, 3e-4, 3e-3])
def test_trials_cost_less_than_one_percent(slope: float) -> None:
    machine = Machine(load_base=0.001, load_slope=slope).learns()
    extra = declined = 0.0
    trials = 0
    for number in range(10_000):
        tokens = SIZES[number % 5]
        if machine.serve(tokens):
            trials += 1
            extra += machine.load_s(tokens) - machine.compute_s(tokens)
        else:
            declined += machine.compute_s(tokens)
    assert trials > 0
    assert extra < 0.0101 * declined


def test_a_daemon_that_became_faster_is_noticed() -> None:
    machine = Machine(**SLOW).learns(8)
    declined = 0
    while not machine.serve(1024):
        declined += 1
    machine.load_slope = 1e-6
    answers = [machine.serve(1024) for _ in range(20 * declined)]
    assert all(answers[-100:])


def test_a_faster_moment_does_not_end_the_measurements() -> None:
    """One lucky trial says nothing."""
    machine = Machine(**SLOW).learns(8)
    while not machine.serve(1024):
        pass
    slow, machine.load_slope = machine.load_slope, 1e-6
    while not machine.serve(1024):
        pass
    machine.load_slope = slow
    assert sum(machine.serve(1024) for _ in range(100)) <= 2


def test_a_trial_that_never_comes_back_does_not_end_trials() -> None:
    machine = Machine(**SLOW).learns()
    while not machine.pace.worth(1024):
        machine.computes(1024)
    for _ in range(5000):  # its request was aborted
        if machine.pace.worth(1024):
            return
        machine.computes(1024)
    raise AssertionError("no further trial")


def test_trials_that_take_longer_than_expected_are_paid_for() -> None:
    machine = Machine(**SLOW).learns()
    while not machine.pace.worth(1024):
        machine.computes(1024)
    machine.loads(1024, seconds=5.0, ok=False)
    declined = 0.0
    while not machine.pace.worth(1024):
        machine.computes(1024)
        declined += machine.compute_s(1024)
    assert declined > 4.9 / 0.01


def test_another_daemon_is_measured_anew() -> None:
    machine = Machine(**SLOW).learns()
    assert not machine.pace.worth(1024)
    machine.pace.forget_loads()
    assert all(machine.pace.worth(1024) for _ in range(10))
    machine.load_slope = 1e-6
    for _ in range(ENOUGH):
        machine.loads(1024)
    assert machine.pace.worth(1024)


# ---- the option ------------------------------------------------------------------------------------------------------


def test_a_number_of_tokens_is_a_plain_threshold() -> None:
    for least in (0, 300):
        pace = Pace(least)
        assert [pace.worth(tokens) for tokens in (64, 299, 300, 4096)] == [
            tokens >= least for tokens in (64, 299, 300, 4096)
        ]
        assert pace.step_began([(4096, 0)]) == 0  # nothing to learn


def test_equal_measurements_give_equal_answers(seed: int) -> None:
    def answers() -> list[bool]:
        source = random.Random(seed)
        machine = Machine(**FIXED)
        found = []
        for _ in range(3000):
            machine.load_base = source.uniform(0.03, 0.09)
            found.append(machine.serve(source.choice(SIZES)))
            machine.computes(256)
        return found

    assert answers() == answers()


def test_once_it_is_measured_one_step_of_four_is_timed() -> None:
    machine = Machine(load_base=0.0, load_slope=0.0)
    timed = 0
    while timed < WINDOW:
        assert machine.pace.times_steps(STEP_TOKENS)
        number = machine.pace.step_began([(STEP_TOKENS, 0)])
        machine.pace.step_ended(number)
        timed += 1
    assert sum(machine.pace.times_steps(STEP_TOKENS) for _ in range(40)) == 10
    assert not any(machine.pace.times_steps(STEP_TOKENS - 1) for _ in range(8))
    assert not Pace(min_hit=0).times_steps(STEP_TOKENS)  # nothing is learned
