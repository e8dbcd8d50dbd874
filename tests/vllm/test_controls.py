from __future__ import annotations

from typing import Any

import pytest

from kvkeep.ipc.vllm.controls import MAX_LINES, Control, Controls, Scope

DEFAULT = Control(Scope.PROMPT, True, 0.0)


class Log(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def controls(**options: Any) -> tuple[Controls, Log]:
    log = Log()
    return Controls(log, **({"store_generated": False} | options)), log


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False, "other.store": 7}, {"kvkeep.store": True}])
def test_a_request_that_says_nothing_behaves_as_by_default(params: Any) -> None:
    plain, log = controls()
    assert plain.of(params) == DEFAULT
    generated, _ = controls(store_generated=True)
    assert generated.of(params) == Control(Scope.ALL, True, 0.0)
    assert log == []


def test_what_a_request_may_say() -> None:
    plain, log = controls()
    generated, _ = controls(store_generated=True)
    assert plain.of({"kvkeep.store": False}) == Control(Scope.NONE, True, 0.0)
    assert plain.of({"kvkeep.store": "all"}).store is Scope.ALL
    assert generated.of({"kvkeep.store": "prompt"}).store is Scope.PROMPT
    assert generated.of({"kvkeep.store": True}).store is Scope.ALL
    assert plain.of({"kvkeep.load": False}) == Control(Scope.PROMPT, False, 0.0)
    assert plain.of({"kvkeep.priority": "low"}) == DEFAULT._replace(low=True)
    assert plain.of({"kvkeep.priority": "normal"}) == DEFAULT
    assert plain.of({"kvkeep.load": True, "kvkeep.store": None}) == DEFAULT
    assert log == []


BAD: list[tuple[Any, str]] = [
    ({"kvkeep.store": "promt"}, "kvkeep.store is 'promt': it may be true, false, 'prompt' or 'all'"),
    ({"kvkeep.store": 0}, "kvkeep.store is 0"),
    ({"kvkeep.store": 1}, "kvkeep.store is 1"),
    ({"kvkeep.store": ["all"]}, "kvkeep.store is a list of 1"),
    ({"kvkeep.store": {"all": 1}}, "kvkeep.store is a dict of 1"),
    ({"kvkeep.store": float("nan")}, "kvkeep.store is nan"),
    ({"kvkeep.load": "no"}, "kvkeep.load is 'no': it may be true or false"),
    ({"kvkeep.pin_s": "60"}, "kvkeep.pin_s is '60': it must be a number of seconds"),
    ({"kvkeep.pin_s": True}, "kvkeep.pin_s is True"),
    ({"kvkeep.pin_s": float("nan")}, "kvkeep.pin_s is nan"),
    ({"kvkeep.pin_s": float("inf")}, "kvkeep.pin_s is inf"),
    ({"kvkeep.pin_s": -1}, "kvkeep.pin_s is -1"),
    (
        {"kvkeep.prio": 3},
        "there is no 'kvkeep.prio': the keys are kvkeep.store, kvkeep.load, kvkeep.pin_s, kvkeep.priority",
    ),
    ([1, 2], "kv_transfer_params is a list of 2: it must be a dictionary"),
    ("x", "kv_transfer_params is 'x'"),
]


@pytest.mark.parametrize(("params", "words"), BAD)
def test_a_bad_value_is_one_line_and_changes_nothing(params: Any, words: str) -> None:
    plain, log = controls(max_pin_s=100.0)
    assert [plain.of(params) for _ in range(3)] == [DEFAULT] * 3
    (line,) = log
    assert words in line
    assert "\n" not in line


def test_one_bad_value_does_not_take_the_others_with_it() -> None:
    plain, log = controls()
    assert plain.of({"kvkeep.store": False, "kvkeep.load": "x"}) == Control(Scope.NONE, True, 0.0)
    assert len(log) == 1


def test_hostile_values_cost_a_bounded_number_of_short_lines() -> None:
    plain, log = controls()
    plain.of({"kvkeep.store": "x" * 10_000_000})
    plain.of({"kvkeep.store": 1 << 10_000_000})
    plain.of({"kvkeep.store": "a\nb"})
    plain.of({f"kvkeep.{n}": n for n in range(1000)})  # not searched
    for n in range(1000):
        plain.of({"kvkeep.load": n})
    assert len(log) == MAX_LINES
    assert max(map(len, log)) < 400
    assert not any("\n" in line for line in log)
    assert log[-1].endswith("(further values are not logged)")
    assert plain.of({"kvkeep.store": False}).store is Scope.NONE


def test_requests_pin_only_where_the_engines_owner_allows_it_and_no_longer() -> None:
    plain, log = controls()
    assert plain.of({"kvkeep.pin_s": 0}).pin_s == 0
    assert log == []
    assert plain.of({"kvkeep.pin_s": 60}).pin_s == 0
    assert "set the option kvkeep.max_pin_s" in log[0]
    allowed, log = controls(max_pin_s=100.0)
    assert [allowed.of({"kvkeep.pin_s": value}).pin_s for value in (0, 60, 99.5, 1e9)] == [0, 60, 99.5, 100]
    assert log == []
