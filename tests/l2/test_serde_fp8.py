"""fp8 keeps the bound that it states, for every number that a 16-bit float can be, whatever it stands beside."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.l2.options import Options
from kvkeep.l2.serde import Context, Undecodable, Unfit
from kvkeep.l2.serde_fp8 import BLOCK, Fp8
from kvkeep.l2.serde_layout import Layout
from tests.l2.conformance import key
from tests.l2.serdes import Words, floats, to_words, within_bound

FP8 = Fp8(Options("serde fp8", {}))
DTYPES = ("bfloat16", "float16")
LAYOUTS = [(0, 0), (16, 64), (8, 1), (1, 128), (256, 4)]  # tokens, channels


def there_and_back(words: Words, layout: Layout) -> Words:
    data = memoryview(words).cast("B")
    context = Context(key(1), len(data), layout, b"")
    encoded = FP8.encode(data, context)
    back = np.empty_like(words)
    FP8.decode(memoryview(encoded.data), encoded.params, memoryview(back).cast("B"), context)
    return back


def finite(dtype: str) -> Words:
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        return every[np.isfinite(floats(every, dtype))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "channels"), LAYOUTS)
def test_every_number_comes_back_within_the_bound(dtype: str, tokens: int, channels: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    every = finite(dtype)
    group = (tokens or BLOCK) * (channels or 1)
    every = np.concatenate([every, every[: -len(every) % group]])
    for order in ("as they are", "mixed", "mixed", "like with like"):
        words = every if order == "as they are" else random.permutation(every)
        if order == "like with like":
            words = words[np.argsort(np.abs(floats(words, dtype)), kind="stable")]
        back = there_and_back(words, Layout(dtype, tokens, channels))
        assert within_bound(words, back, dtype, tokens or BLOCK, channels or 1), order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", range(-24, 16))
def test_every_mantissa_under_every_scale_comes_back_within_the_bound(dtype: str, power: int) -> None:
    """Channels whose largest number is 2^power, with everything that can stand below it."""
    values = floats(finite(dtype), dtype)
    below = values[np.abs(values) <= 2.0**power]
    rows = -(-len(below) // (BLOCK - 1))
    table = np.zeros((rows, BLOCK))
    table[:, 1:].flat[: len(below)] = below
    table[:, 0] = 2.0**power
    words = to_words(table.reshape(-1), dtype)
    assert (floats(words, dtype) == table.reshape(-1)).all(), "the test's own numbers"
    assert within_bound(words, there_and_back(words, Layout(dtype)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_go_to_the_even_neighbour(dtype: str) -> None:
    """e4m3 has eight steps from 1 to 2: what lies in the middle of two goes up and down in turn."""
    steps = np.arange(16)
    values = np.concatenate([[2.0], 1 + (2 * steps[:8] + 1) / 16, np.zeros(BLOCK - 9)])
    back = floats(there_and_back(to_words(values, dtype), Layout(dtype)), dtype)
    assert back[1:9].tolist() == [1.0, 1.25, 1.25, 1.5, 1.5, 1.75, 1.75, 2.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_e4m3_has_come_back_as_they_are(dtype: str) -> None:
    exact = [m / 8 * 2.0**e for m in range(8, 16) for e in range(-6, 7)] + [0.0, -0.0, -1.5, 128.0]
    words = to_words(np.array(exact), dtype)
    assert (there_and_back(words, Layout(dtype, len(exact), 1)) == words).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 1000, (1 << 16) + 3])
def test_any_number_of_numbers_has_a_last_block(dtype: str, length: int, seed: int) -> None:
    words = to_words(np.random.default_rng(seed).normal(0, 1, length), dtype)
    assert within_bound(words, there_and_back(words, Layout(dtype)), dtype)
    assert within_bound(words, there_and_back(words, Layout(dtype, 16, 64)), dtype) or length % 1024 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zero_and_cost_a_byte_each(dtype: str) -> None:
    words = np.zeros(4096, np.uint16)
    words[1::2] = 0x8000
    data = memoryview(words).cast("B")
    encoded = FP8.encode(data, Context(key(1), len(data), Layout(dtype), b""))
    assert len(encoded.data) == 4096 + 32
    assert (there_and_back(words, Layout(dtype)) == words).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_object_with_a_nan_or_an_infinity_is_passed_over(dtype: str, bad: float) -> None:
    values = np.ones(70_000)
    values[69_999] = bad
    with pytest.raises(Unfit, match="NaN or an infinity"):
        there_and_back(to_words(values, dtype), Layout(dtype))


@pytest.mark.parametrize("layout", [Layout(), Layout("float32")])
def test_what_is_no_16_bit_float_is_passed_over(layout: Layout) -> None:
    with pytest.raises(Unfit):
        there_and_back(np.ones(128, np.uint16), layout)
    with pytest.raises(Unfit):
        FP8.encode(memoryview(bytes(255)), Context(key(1), 255, Layout("bfloat16"), b""))
    with pytest.raises(Unfit):
        FP8.encode(memoryview(bytes(256)), Context(key(1), 256, Layout("bfloat16"), b"another serde"))


def test_per_channel_scales_keep_a_small_channel_beside_a_large_one() -> None:
    """The reason for channels: 2^-20 beside 1.0 is zero under one scale, and precise under its own."""
    values = np.ones((16, 2))
    values[:, 1] = 2.0**-20
    words = to_words(values.reshape(-1), "bfloat16")
    assert (there_and_back(words, Layout("bfloat16", 16, 2)) == words).all()
    assert (floats(there_and_back(words, Layout("bfloat16")), "bfloat16").reshape(16, 2)[:, 1] == 0).all()


def test_parameters_and_bytes_of_any_kind_are_refused_or_give_numbers(seed: int) -> None:
    random = np.random.default_rng(seed)
    context = Context(key(1), 512, Layout(), b"")
    refused = 0
    for _ in range(2000):
        params = random.bytes(int(random.choice([0, 8, 9, 9, 9, 10])))
        if random.random() < 0.5:
            params = bytes([1 + int(random.integers(3))]) + int(random.choice([1, 2, 64, 128])).to_bytes(4, "little")
            params += int(random.choice([0, 1, 2])).to_bytes(4, "little")
        into = memoryview(bytearray(512))
        try:
            FP8.decode(
                memoryview(random.bytes(int(random.choice([0, 257, 258, 260, 384, 512])))), params, into, context
            )
        except Undecodable:
            refused += 1
    assert 1000 < refused < 2000
