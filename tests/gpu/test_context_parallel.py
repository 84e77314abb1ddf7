"""The calls of all ranks of a ring on one GPU: results and gradients are those of the unsharded call."""

import itertools

import pytest
import torch

from cute_flash import ops
from cute_flash.distributed.accumulate import Scores
from cute_flash.distributed.ring import Schedule, max_steps
from cute_flash.distributed.sharding import Sharding
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.family import FAMILIES
from tests.combinations import RNG
from tests.covering import covering
from tests.distributed.one_process import ring

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]
N, LENGTH = 4, 1024


CALLS = covering(
    list(itertools.product(FAMILIES, (64, 128), (Band(None, 0), Band(), Band(200, 50)), (0.0, 0.3))), tuple
)


@pytest.mark.parametrize(("family", "head_dim", "band", "dropout"), CALLS, indirect=["family"], ids=str)
def test_shards_have_the_results_of_the_unsharded_call(family, head_dim, band, dropout):
    torch.manual_seed(0)
    # The second half of the heads of a call, as after an exchange of heads.
    heads, rng = (4, 8), torch.tensor(RNG, device="cuda") if dropout else None
    q, k, v, dout = (torch.randn(2, h, LENGTH, head_dim, device="cuda").bfloat16() for h in (4, 2, 2, 4))
    args = AttentionArgs(scale=head_dim**-0.5, dropout=dropout)
    full = args._replace(window_left=band.left, window_right=band.right, rng=rng, dropout_origin=(0, 0, *heads))
    expected_out, expected_lse, _ = ops.attention(q, k, v, full)
    expected = (expected_out, *ops.gradients(dout, None, q, k, v, expected_out, expected_lse, full)[:3])

    schedule = Schedule(Sharding.of("zigzag", N, LENGTH), band, bool(dropout), max_steps(4, 2))
    found = ring(schedule, [q, k, v, dout], Scores(args, rng=rng, heads=heads))
    for x, y in zip(found, expected, strict=True):
        x, y = x.float(), y.float()
        assert (x - y).abs().max() <= 2e-2 * y.abs().max()
        assert (x - y).norm() <= 1e-2 * y.norm()
