"""Philox against its published vectors, and the mask against its definition, score by score."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cute_flash.reference.dropout import Dropout, philox_4x32
from cute_flash.runtime.rng import draw_seed
from cute_flash.spec.dropout import MAX_RANDOM, RANDOM_BITS, ROW_16_FACTOR, threshold

# Random123, tests/kat_vectors: philox4x32 7, (counter, key, result).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]
# The same for ten rounds, for `philox_by_the_paper`.
KNOWN_OF_TEN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    k0, k1 = words(key)
    assert [int(x) for x in philox_4x32((c0, c1, c2, c3), (k0, k1))] == words(expected)


def philox_by_the_paper(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    """Philox as in the paper, with Python integers, which do not overflow."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(rounds):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k, y % 2**32, (x >> 32) ^ d ^ m, x % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize(("rounds", "known"), [(7, KNOWN), (10, KNOWN_OF_TEN)])
def test_the_model_has_the_published_vectors(rounds: int, known: list[tuple[str, str, str]]) -> None:
    for counter, key, expected in known:
        assert philox_by_the_paper(words(counter), words(key), rounds) == words(expected)


@pytest.mark.parametrize(
    ("rows", "keys"), [(range(0, 32), range(0, 16)), (range(13, 37), range(14, 50)), (range(56, 57), range(7, 8))]
)
def test_each_score_has_the_documented_random_number(rows: range, keys: range) -> None:
    seed, offset, heads = 0x7123456789ABCDEF, 0x3FEDCBA987654321, 5
    dropout = Dropout(0.3, torch.tensor([seed, offset]), heads)
    kept = dropout.keep_mask(range(3, 5), range(2, 4), rows, keys)
    assert kept.shape == (2, 2, len(rows), len(keys))
    places = itertools.product(enumerate((3, 4)), enumerate((2, 3)), enumerate(rows), enumerate(keys))
    for (nb, b), (nh, h), (ni, i), (nj, j) in places:
        counter = [4 * (j // 16) + j % 8 // 2, 8 * (i // 32) + i % 8, b * heads + h, offset % 2**32]
        found = philox_by_the_paper(counter, [seed % 2**32, seed >> 32])
        word = found[2 * (i // 8 % 2) + j // 8 % 2] * (0xC2B2AE35 if i % 32 >= 16 else 1)
        draw = (word >> 16 * (j % 2)) % 2**15
        assert bool(kept[nb, nh, ni, nj]) == (draw >= round(0.3 * 2**15))


def test_a_shard_has_the_mask_of_the_full_call() -> None:
    mask = Dropout(0.5, torch.tensor([5, 6]), 7).keep_mask(range(2), range(7), range(70), range(90))
    shard = Dropout(0.5, torch.tensor([5, 6]), 7, (13, 37, 2))
    assert torch.equal(shard.keep_mask(range(2), range(3), range(40), range(50)), mask[:, 2:5, 13:53, 37:87])


def test_a_mask_does_not_depend_on_its_blocks() -> None:
    dropout = Dropout(0.5, torch.tensor([5, 6]), 3)
    mask = dropout.keep_mask(range(2), range(3), range(70), range(90))
    for rows, keys in ((range(0, 70), range(33, 90)), (range(17, 23), range(5, 71))):
        block = dropout.keep_mask(range(1, 2), range(1, 3), rows, keys)
        assert torch.equal(block, mask[1:2, 1:3, rows.start : rows.stop, keys.start : keys.stop])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_dropped_weights(p: float) -> None:
    kept = Dropout(p, torch.tensor([1, 2]), 4).keep_mask(range(2), range(4), range(256), range(256))
    # Half a million draws: five standard deviations.
    assert abs(1 - p - kept.double().mean().item()) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    # Rows, keys and heads all have different masks.
    for dim in range(4):
        assert (kept.diff(dim=dim).double().mean() - 2 * p * (1 - p)).abs() < 0.01


def excess_of_both(first: Tensor, second: Tensor) -> Tensor:
    """For every p, the difference between p^2 and the fraction of pairs in which both are dropped."""
    num = 1 << RANDOM_BITS
    below = torch.bincount(torch.maximum(first, second), minlength=num).cumsum(0) / len(first)
    return (below - (torch.arange(1, num + 1) / num).double() ** 2).abs()


def test_rows_that_share_a_word_are_nearly_independent() -> None:
    """Even keys, over all values of the low half. No other bits of a word affect them."""
    words = torch.arange(1 << 16)
    first, second = words & MAX_RANDOM, words * ROW_16_FACTOR & MAX_RANDOM
    excess = excess_of_both(first, second).max().item() * 2**RANDOM_BITS
    assert 3.0 < excess < 3.5
    # Each number alone is uniform, because the factor is odd.
    assert torch.equal(second[: 1 << RANDOM_BITS].sort().values, torch.arange(1 << RANDOM_BITS))
    swapped = (words >> 8 | words << 8) & MAX_RANDOM
    assert 2.0**-10 < excess_of_both(first, swapped).max() < 2.0**-8.9


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_odd_keys_are_even_more_independent(p: float) -> None:
    """Odd keys, over all high and low halves; the product of the low half carries into the high half."""
    num, below = 1 << RANDOM_BITS, threshold(p)
    carry = (torch.arange(1 << 16) * ROW_16_FACTOR >> 16) & MAX_RANDOM
    shares = torch.bincount(carry, minlength=num) / (1 << 16)
    up_to = torch.cat([torch.zeros(1), torch.cat([shares, shares]).double().cumsum(0)]).double()
    # Carries for which a dropped high half has a product that is dropped too.
    begin = (-torch.arange(below) * ROW_16_FACTOR) & MAX_RANDOM
    both = (up_to[begin + below] - up_to[begin]).sum().item() / num
    assert abs(both - (below / num) ** 2) < 2.0**-25


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_all_scores_of_a_word_together(p: float) -> None:
    """Each of the 16 combinations of four dropped or kept scores has its expected frequency."""
    kept = Dropout(p, torch.tensor([7, 8]), 4).keep_mask(range(2), range(4), range(512), range(512))
    # Rows i and i + 16 of each group of 32 rows, and neighbouring keys.
    above, below = kept.unflatten(2, (-1, 2, 16)).unbind(3)
    ways = sum(x[..., key::2].long() << bit for bit, (x, key) in enumerate(itertools.product((above, below), range(2))))
    assert isinstance(ways, Tensor)
    found = torch.bincount(ways.flatten(), minlength=16)
    for way, count in enumerate(found.tolist()):
        kept_ones = way.bit_count()
        expected = ways.numel() * (1 - p) ** kept_ones * p ** (4 - kept_ones)
        assert abs(count - expected) < 5 * expected**0.5


def test_seed_and_offset_both_matter() -> None:
    masks = [
        Dropout(0.5, torch.tensor(rng), 1).keep_mask(range(1), range(1), range(64), range(64))
        for rng in ([1, 2], [2, 2], [1, 3], [1 + (1 << 32), 2])
    ]
    assert len({bytes(mask.flatten().tolist()) for mask in masks}) == 4


def test_thresholds() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 1 << 14
    assert threshold(1 - 2**-40) == (1 << 15) - 1


def test_rng_follows_the_generator() -> None:
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn += [draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))]
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[4])
    assert all(x.dtype == torch.int64 and x.shape == (2,) for x in drawn)
