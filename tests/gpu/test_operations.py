"""Operations of user mods on a GPU, against the CPU path: every one of `tests.operations`, and indices that wrap.

Elements of q and k are small integers, so that GPU and CPU compute equal scores, even at the jumps of an operation.
"""

import itertools
from collections.abc import Iterable

import pytest
import torch

import cute_flash
from cute_flash import UnsupportedError
from cute_flash.spec.family import FAMILIES
from tests import row_mods
from tests.operations import SCORE_MODS, score_mods

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

HEADS, SEQLEN, HEAD_DIM = 4, 150, 64
GROUPS = [names for names in itertools.zip_longest(*[iter(SCORE_MODS)] * 8)]
# Mods whose gradient has too many operations for the Hopper backward.
LONG_ROW_MODS = ("distance", "amax", "min")
SMOOTH = ("erf", "gelu", "gelu tanh", "softplus", "logsigmoid", "atan", "powers", "power of a table")


def alternately(names: Iterable[str]) -> list[tuple[str, str]]:
    """Every name by one family; long mods by both, because one refuses their gradients."""
    pairs = enumerate(itertools.product(names, FAMILIES))
    return [(name, family) for i, (name, family) in pairs if name in LONG_ROW_MODS or i % 4 in (0, 3)]


def inputs(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-1, 2, (1, HEADS, SEQLEN, HEAD_DIM), generator=generator) for _ in range(2))
    v = torch.randn(1, HEADS, SEQLEN, HEAD_DIM, generator=generator).bfloat16()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [x.to(device, dtype).requires_grad_() for x in (q, k, v)]


def sum_of(names, device):
    """The sum of some mods, as a triangular wave: it neither saturates the softmax nor jumps."""
    mods = [mod for name, mod in score_mods(device).items() if name in names]
    return lambda *args: (sum(mod(*args) for mod in mods) % 8.0 - 4.0).abs()


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: str(names[0]))
def test_values(names) -> None:
    # Without gradients, because the Hopper backward refuses those of long mods.
    with torch.no_grad():
        found, expected = (
            cute_flash.attn(*inputs(device), score_mod=sum_of(names, device), return_lse=True)
            for device in ("cuda", "cpu")
        )
    torch.testing.assert_close(found[0].cpu().float(), expected[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "family"), alternately(SMOOTH), indirect=["family"])
def test_gradients(name, family) -> None:
    found = []
    for device in ("cuda", "cpu"):
        q, k, v = inputs(device)
        mod = score_mods(device)[name]
        try:
            out = cute_flash.attn(q, k, v, score_mod=lambda s, b, h, i, j, mod=mod: mod(s, b, h, i, j) * 0.2)
        except UnsupportedError as error:
            if family != "sm90":
                raise
            pytest.skip(str(error))  # long mods have no wgmma tile; without a family, attn takes mma.sync
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        found.append([x.cpu().float() for x in grads])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() < 2e-2 * theirs.norm() + 1e-3


@pytest.mark.parametrize("step", [1, 2, 64])
def test_negative_indices_wrap(step) -> None:
    """The values, and the gradient of the table. Division rounds down."""
    table = torch.randn(HEADS, SEQLEN, generator=torch.Generator().manual_seed(2))
    found = []
    for device in ("cuda", "cpu"):
        own = table.to(device).requires_grad_()
        out = cute_flash.attn(*inputs(device), score_mod=lambda s, b, h, q, kv, own=own: s + own[h, (q - kv) // step])
        (grad,) = torch.autograd.grad(out.float().square().sum(), own)
        found.append((out.detach().cpu().float(), grad.cpu()))
    (out, grad), (expected_out, expected_grad) = found
    torch.testing.assert_close(out, expected_out, rtol=2e-2, atol=1e-2)
    assert (grad - expected_grad).norm() < 2e-2 * expected_grad.norm()
    i = torch.arange(SEQLEN)
    bias = table[:, (i[:, None] - i) // step]
    torch.testing.assert_close(expected_out, cute_flash.attn(*inputs("cpu"), bias=bias), rtol=1e-4, atol=1e-4)


def test_tables_of_small_ints() -> None:
    tables = [torch.arange(-4, 4), torch.arange(8), torch.arange(-400, 400, 100), torch.arange(8) % 3 == 0]
    dtypes = torch.int8, torch.uint8, torch.int16, torch.bool
    found = []
    for device in ("cuda", "cpu"):
        a, b, c, d = (x.to(device, dtype) for x, dtype in zip(tables, dtypes, strict=True))

        def mask(batch, h, q, kv, a=a, b=b, c=c, d=d):
            return (a[q % 8] < b[kv % 8] - 3) | (c[(q + kv) % 8] == 100) | d[kv % 8] | (q == kv)

        with torch.no_grad():
            found.append(cute_flash.attn(*inputs(device), mask_mod=mask).cpu().float())
    torch.testing.assert_close(*found, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(("name", "family"), alternately(row_mods.MODS), indirect=["family"])
def test_rows(name, family) -> None:
    """Reductions of rows of a captured tensor, and their gradients."""
    if family == "sm90" and name in LONG_ROW_MODS:
        table = row_mods.row_table(device="cuda").requires_grad_()
        q = row_mods.queries(torch.bfloat16, device="cuda", head_dim=64)
        with pytest.raises(UnsupportedError, match="operations per score"):
            cute_flash.attn(q, q, q, score_mod=row_mods.MODS[name](table))
        return
    found = []
    for device in ("cuda", "cpu"):
        q = row_mods.queries(torch.bfloat16, device=device, head_dim=64)
        table = row_mods.row_table(device=device).requires_grad_()
        out = cute_flash.attn(q, q, q, score_mod=row_mods.MODS[name](table))
        (grad,) = torch.autograd.grad(out.float().square().sum(), table)
        found.append((out.detach().cpu().float(), grad.cpu()))
    (out, grad), (expected_out, expected_grad) = found
    torch.testing.assert_close(out, expected_out, rtol=2e-2, atol=1e-2)
    assert (grad - expected_grad).norm() < 3e-2 * expected_grad.norm() + 1e-3
