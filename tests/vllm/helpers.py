"""Comparing what two engines said."""

from __future__ import annotations

from typing import Any

# The order of additions differs with the number of tokens computed at once, so logprobs of equal KV differ in the last
# digits of float32.  One wrong page moves them by 0.1 and more (test_wrong_kv_would_be_seen).
LOGPROB_TOLERANCE = 2e-3
BFLOAT16_TOLERANCE = 0.2  # and a model that is less excitable


def assert_same_outputs(
    got: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float = LOGPROB_TOLERANCE
) -> None:
    """Equal tokens and logprobs.  Where the two best tokens are closer than the tolerance, either may win."""
    assert len(got) == len(wanted)
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one["finish"] == "length", f"answer {number} ended with {one['finish']}"
        assert difference(one, other, tolerance) < tolerance, f"answer {number}: {one} instead of {other}"


def difference(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = LOGPROB_TOLERANCE) -> float:
    """Largest difference of logprobs; infinite if other tokens were chosen."""
    furthest = 0.0
    for step, token in enumerate(wanted["tokens"]):
        if got["tokens"][step] != token:
            return furthest if wanted["margins"][step] < tolerance else float("inf")
        furthest = max(furthest, abs(got["logprobs"][step] - wanted["logprobs"][step]))
    return furthest


def assert_nothing_held(report: dict[str, Any]) -> None:
    """An idle engine pins no block and holds no reference."""
    assert (report["pinned"], report["held"]) == (0, 0)
    assert report["free_blocks"] == report["blocks"] - 1  # one is vLLM's null block
