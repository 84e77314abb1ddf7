"""Rows in mods: operations and reductions over the last dimension of captured tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import TraceError, attn, flex_attention
from cute_flash.score_mod.proxy import MAX_ROW
from tests.row_mods import MODS, TILES, queries, row_table


def unfused(q: Tensor, mod: Any) -> Tensor:
    """Attention of q over itself, with the mod called on one score at a time."""
    scores = (q @ q.mT) * q.shape[-1] ** -0.5
    places = [torch.arange(n).tolist() for n in scores.shape]
    changed = torch.stack([
        mod(scores[b, h, i, j], *map(torch.tensor, (b, h, i, j)))
        for b in places[0] for h in places[1] for i in places[2] for j in places[3]
    ])  # fmt: skip
    return changed.view_as(scores).softmax(-1) @ q


@pytest.mark.parametrize("name", MODS)
def test_results_and_gradients(name: str) -> None:
    q, table = queries(torch.float64), row_table().requires_grad_()
    mod, weights = MODS[name](table), queries(torch.float64, seed=1)
    found, expected = attn(q, q, q, score_mod=mod), unfused(q, mod)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    grad, expected_grad = (torch.autograd.grad((out * weights).sum(), table)[0] for out in (found, expected))
    assert grad.abs().sum() > 0
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_mask_of_listed_tiles() -> None:
    """A query sees the keys of the tiles that its row lists."""
    q = queries(torch.float32)

    def listed(b, h, i, j):
        return (TILES[h, i // 4] == (j // 4).unsqueeze(-1)).any(dim=-1)

    heads, rows, keys = (torch.arange(n) for n in (2, 12, 12))
    mask = (TILES[heads][:, rows // 4][:, :, None] == (keys // 4)[:, None]).any(-1)
    scores = ((q @ q.mT) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attn(q, q, q, mask_mod=listed), scores.softmax(-1) @ q)


def test_flex_attention_takes_rows() -> None:
    q, mod = queries(torch.float64), MODS["dot"](row_table())
    torch.testing.assert_close(flex_attention(q, q, q, mod), unfused(q, mod), rtol=1e-6, atol=1e-6)


def test_another_length_of_the_row() -> None:
    q, captured = queries(torch.float64), SimpleNamespace()
    for width in (5, 2, 5, 1):
        captured.table = row_table(width)

        def mod(score, b, h, i, j):
            return score + torch.dot(captured.table[i], captured.table[j])

        expected = ((q @ q.mT) * q.shape[-1] ** -0.5 + captured.table @ captured.table.T).softmax(-1) @ q
        torch.testing.assert_close(attn(q, q, q, score_mod=mod), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.compiles
def test_torch_compile_breaks_the_graph() -> None:
    q, mod = queries(torch.float32), MODS["dot"](row_table())

    def layer(q):
        return 2 * attn(2 * q, q, q, score_mod=mod)

    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(q), layer(q))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(q)


LONG, ROWS, OTHER = torch.ones(12, MAX_ROW + 1), row_table(), torch.ones(12, 3)
REFUSED = [
    (lambda s, b, h, i, j: s + ROWS[i], "it returns a row of values: index or reduce it"),
    (lambda s, b, h, i, j: s + ROWS, "a captured tensor of 2 dimension.* as a value: index it"),
    (lambda s, b, h, i, j: s + ROWS.sum(), r"\.sum of a captured tensor"),
    (lambda s, b, h, i, j: s if ROWS[i] > 0 else -s, r"the truth of a row of values: use \.any\(\) or \.all\(\)"),
    (lambda s, b, h, i, j: s + ROWS[i].dot(s), "a dot product of a row and a value"),
    (lambda s, b, h, i, j: s + ROWS[i].max(dim=-1).values, "max with dim: use amax"),
    (lambda s, b, h, i, j: s + ROWS[i].sum(1), "dim=1 of a row of values"),
    (lambda s, b, h, i, j: s + ROWS[i].softmax(-1)[0], r"\.softmax of a row of a captured tensor is not supported"),
    (lambda s, b, h, i, j: s + (ROWS[i] * OTHER[j]).sum(), "rows of 3 and 5 elements"),
    (lambda s, b, h, i, j: s + LONG[i].sum(), f"a row of {MAX_ROW + 1} elements .* use 1 to {MAX_ROW}"),
    (lambda s, b, h, i, j: s + ROWS[i].exp()[j], "indexing a row of values"),
    (lambda s, b, h, i, j: s + ROWS[i].unsqueeze(0).sum(), "at most one dimension"),
    (lambda s, b, h, i, j: s.unsqueeze(1).sum(), r"unsqueeze\(1\) of a value"),
]


@pytest.mark.parametrize(("mod", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(mod: Any, message: str) -> None:
    q = queries(torch.float32)
    with pytest.raises(TraceError, match=message):
        attn(q, q, q, score_mod=mod)
