"""TMA with the end of a varlen sequence: loads past the end give zeros, stores past the end are dropped."""

import pytest
import torch

from tests.gpu import families

pytestmark = pytest.mark.gpu

TOKENS, HEADS = 1000, 3
# (begin, length, block): full tiles, a partial tile, no rows, the first token, the last token, the end of all tokens.
PLACES = [(100, 200, 0), (100, 200, 2), (100, 200, 3), (100, 200, 5), (0, 1, 0), (999, 1, 0), (0, 1000, 15)]


@pytest.mark.parametrize("head_dim", (64, 72, 128, 256))
def test_a_tile_of_a_sequence(head_dim):
    if reason := families.obstacle("sm90"):
        pytest.skip(reason)
    from tests.gpu.ragged_copy import RaggedCopy

    kernel = RaggedCopy(head_dim)
    copy, tile = kernel.compiled(), kernel.tile
    x = torch.randn(TOKENS, HEADS, head_dim, device="cuda").bfloat16()
    for begin, length, block in PLACES:
        # Rows outside of the sequence are NaN; none may be loaded.
        source = torch.full_like(x, torch.nan)
        source[begin : begin + length] = x[begin : begin + length]
        target, seen = (torch.full_like(x, 7.0), torch.full((tile.rows, HEADS, tile.cols), 9.0).cuda().bfloat16())
        copy(source, target, seen, begin, length, block)
        torch.cuda.synchronize()
        first = begin + block * tile.rows
        rows = max(0, min(tile.rows, begin + length - first))
        expected = torch.zeros_like(seen)
        expected[:rows, :, :head_dim] = x[first : first + rows]
        assert torch.equal(seen, expected), f"load of {(begin, length, block)}"
        stored = torch.full_like(x, 7.0)
        stored[first : first + rows] = x[first : first + rows]
        assert torch.equal(target, stored), f"store of {(begin, length, block)}"


def test_strides_of_a_packed_qkv():
    if reason := families.obstacle("sm90"):
        pytest.skip(reason)
    from tests.gpu.ragged_copy import RaggedCopy

    copy = RaggedCopy(128).compiled()
    x = torch.randn(TOKENS, 3, HEADS, 128, device="cuda").bfloat16()[:, 1]
    target, seen = (torch.zeros(TOKENS, HEADS, 128).cuda().bfloat16(), torch.zeros(64, HEADS, 128).cuda().bfloat16())
    copy(x, target, seen, 300, 70, 1)
    torch.cuda.synchronize()
    assert torch.equal(target[364:370], x[364:370]) and not target[370:].any() and not target[:364].any()
    assert torch.equal(seen[:6], x[364:370]) and not seen[6:].any()
