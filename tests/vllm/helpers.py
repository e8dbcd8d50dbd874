"""Comparing what two engines said."""

from __future__ import annotations

from typing import Any

# The order of additions differs with the number of tokens computed at once, so logprobs of equal KV differ in the last
# digits of float32.  One wrong page moves them by 0.1 and more (test_outputs_show_wrong_kv).
LOGPROB_TOLERANCE = 1e-3


def assert_same_outputs(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [answer["tokens"] for answer in got] == [answer["tokens"] for answer in wanted]
    assert furthest(got, wanted) < LOGPROB_TOLERANCE
    assert {answer["finish"] for answer in got} == {"length"}


def furthest(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> float:
    """The largest difference of logprobs."""
    return max(
        (
            abs(one - other)
            for left, right in zip(got, wanted, strict=True)
            for one, other in zip(left["logprobs"], right["logprobs"], strict=True)
        ),
        default=0.0,
    )


def assert_nothing_held(report: dict[str, Any]) -> None:
    """An idle engine pins no block and holds no reference."""
    assert (report["pinned"], report["held"]) == (0, 0)
    assert report["free_blocks"] == report["blocks"] - 1  # one is vLLM's null block
