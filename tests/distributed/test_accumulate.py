"""Merging the outputs of two calls over disjoint keys."""

import torch

from cute_flash.distributed.accumulate import merge_

INF, NAN = float("inf"), float("nan")


def merged(lse: list[float], more_lse: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 1 merged with rows of 3; a row without keys has output 0."""
    first, second = (torch.tensor(x, dtype=torch.float64) for x in (lse, more_lse))
    out, more_out = (value * (x != -INF)[:, None].expand(-1, 2).double() for x, value in ((first, 1), (second, 3)))
    merge_(out, first, more_out, second)
    return out, first


def test_weights() -> None:
    out, lse = merged([0.0, 2.0, -INF, 5.0], [0.0, 0.0, 1.0, -INF])
    weight = torch.tensor([0.5, 1 / (1 + torch.e**2), 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(out, (1 + 2 * weight)[:, None].expand(4, 2))
    expected = torch.logaddexp(torch.tensor([0.0, 2.0]).double(), torch.zeros(2).double())
    torch.testing.assert_close(lse, torch.cat([expected, torch.tensor([1.0, 5.0]).double()]))


def test_rows_without_keys() -> None:
    out, lse = merged([-INF], [-INF])
    assert not out.any() and lse.item() == -INF


def test_nan_is_not_lost() -> None:
    out, lse = merged([NAN, 0.0, NAN], [0.0, NAN, NAN])
    assert out.isnan().all() and lse.isnan().all()
