from __future__ import annotations

import pytest

from kvkeep.ipc.vllm.options import OptionError, Options, parse


def test_no_options_means_the_defaults() -> None:
    assert parse({}) == Options()


def test_keys_of_others_are_left_alone() -> None:
    assert parse({"connectors": [], "kvkeep.chunk_tokens": 512}) == Options(chunk_tokens=512)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"kvkeep.chunk_token": 1}, "unknown option 'kvkeep.chunk_token'"),
        ({"kvkeep.chunk_tokens": "256"}, "must be of type int"),
        ({"kvkeep.chunk_tokens": True}, "must be of type int"),
        ({"kvkeep.pinned_fraction": 2}, "between 0 and 1"),
        ({"kvkeep.transfer_deadline_s": -1.0}, "between"),
        ({"kvkeep.store_generated": 1}, "must be of type bool"),
        ({"kvkeep.min_hit": "learnt"}, "kvkeep.min_hit is 'learnt': it must be 'learned' or a number of tokens"),
        ({"kvkeep.min_hit": 1.5}, "must be 'learned' or a number"),
        ({"kvkeep.min_hit": True}, "must be 'learned' or a number"),
        ({"kvkeep.min_hit": -1}, "between 0 and"),
        ({"kvkeep.max_pin_s": -1}, "between 0 and"),
    ],
)
def test_a_wrong_option_is_one_sentence(extra: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        parse(extra)
    assert "\n" not in str(caught.value)


def test_the_smallest_hit_is_learned_or_a_number_of_tokens() -> None:
    assert parse({}).min_hit == "learned"
    for value in ("learned", 0, 4096):
        assert parse({"kvkeep.min_hit": value}).min_hit == value


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
    assert parse({"kvkeep.transfer_deadline_s": 3}).transfer_deadline_s == 3.0
