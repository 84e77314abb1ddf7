"""Random valid and invalid arguments: `attn` returns the right result or raises a documented error.

Each test runs at least `LEAST_CALLS` calls; `make nightly` runs for a minute (`--fuzz-seconds`).
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_flash import BlockMask, attn, masks, supports
from tests.definition import attention

LEAST_CALLS = 200
NONSENSE = [
    None,
    "x",
    -1,
    0,
    2.5,
    math.nan,
    math.inf,
    [],
    {},
    (1, 2),
    object(),
    np.ones(3),
    torch.ones(3),
    b"",
    1 << 70,
]


def tensor(draw: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))


def table(draw: random.Random, b: int, h: int, sq: int, sk: int) -> dict[str, Any]:
    """A valid value for each keyword. The caller omits each keyword half of the time."""
    bias_shape = [draw.choice((1, n)) for n in (b, h, sq, sk)][draw.randrange(4) :]
    learned = tensor(draw, h)
    return {
        "causal": draw.choice((True, False, np.bool_(True))),
        "window": (draw.choice((None, 0, 3, np.int64(2), torch.tensor(1))), draw.choice((None, 0, 5))),
        "scale": draw.choice((0.3, 1, -0.5, 0, np.float32(0.25), torch.tensor(0.5))),
        "softcap": draw.choice((2.0, 30, None)),
        "alibi": tensor(draw, *draw.choice([(h,), (b, h)])).abs(),
        "sinks": tensor(draw, h),
        "bias": tensor(draw, *bias_shape),
        "score_mod": draw.choice((None, lambda s, b, h, i, j: s * 0.5 + learned[h])),
        "mask_mod": draw.choice((None, lambda b, h, i, j: (i + 2 * j) % 3 != 0)),
        "block_mask": draw.choice((None, BlockMask.of(masks.causal(), (b, h, sq, sk), tile=(4, 4)))),
        "return_lse": draw.choice((True, False)),
        "deterministic": draw.choice((True, False)),
        "dropout": draw.choice((0.0, 0, None)),
        "attention_chunk": draw.choice((None, 0, 1, 4, np.int64(3), torch.tensor(50))),
        "layout": "bhsd",
        "out_dtype": draw.choice((None, torch.float64)),
    }


def test_random_arguments(request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds")
    draw, end = random.Random(seconds), time.monotonic() + seconds
    num_right = num_refused = 0
    while time.monotonic() < end or num_right + num_refused < LEAST_CALLS:
        b, kv, group = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 2)
        h, sq, sk, d = kv * group, draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 8)
        q, k, v = tensor(draw, b, h, sq, d), tensor(draw, b, kv, sk, d), tensor(draw, b, kv, sk, draw.randint(1, 8))
        keywords = {name: x for name, x in table(draw, b, h, sq, sk).items() if draw.random() < 0.5}
        is_wrong = draw.random() < 0.5
        for _ in range(draw.randint(1, 2) if is_wrong else 0):
            keywords[draw.choice([*table(draw, b, h, sq, sk), "score_mod_bwd"])] = draw.choice(NONSENSE)
        if is_wrong and draw.random() < 0.1:
            k = draw.choice([None, k.float(), k[:, :, :-1], k[0], np.ones((2, 2)), "k"])
        supported = supports(q, k, v, **keywords)
        try:
            results = attn(q, k, v, **keywords)
        except ValueError as error:
            num_refused += 1
            assert str(error) and not supported, keywords
            assert is_wrong or "differs from the mask_mod of block_mask" in str(error), (keywords, error)
            continue
        num_right += 1
        assert supported, (keywords, supported.reason)
        out, lse = attention(q, k, v, keywords)
        found = results if isinstance(results, tuple) else (results,)
        for x, y in zip(found, (out, lse)):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=str(keywords))
    assert num_right > 10 and num_refused > 10
