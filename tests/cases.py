"""Shapes, inputs and the error rule that all tests of attention share, with and without a GPU.

The error of a result against the fp64 oracle may be at most twice the error of unfused PyTorch in the same dtype (the
yardstick), plus a floor for results that PyTorch happens to compute exactly. The rule applies to the maximum and to the
mean. The maximum alone is not enough: in causal attention the first rows average few values and are the largest, so it
would miss errors in all later, smaller rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem

FULL, CAUSAL = Band(), Band(None, 0)

# Floors relative to the oracle: half a unit in the last place for fp16 and bf16, the error of correct rounding; the
# documented accuracy for fp32; rounding noise of sums for fp64.
RELATIVE_FLOOR = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 1e-5, torch.float64: 1e-12}
# The LSE is fp32 for 16-bit inputs too. Scores of unit-variance inputs have errors of about 1e-6. One missing key among
# 4096 changes the LSE by 2.4e-4, which the tolerance must detect.
LSE_ATOL = {torch.float32: 5e-5, torch.float64: 1e-11}
LSE_RTOL = {torch.float32: 1e-5, torch.float64: 1e-11}


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    band: Band = field(default_factory=Band)

    @property
    def id(self) -> str:
        sides = {"l": self.band.left, "r": self.band.right}
        bounds = "".join(f"{side}{value}" for side, value in sides.items() if value is not None)
        mask = "causal" if self.band == CAUSAL else bounds or "full"
        heads = f"b{self.batch}h{self.heads}kv{self.heads_kv}"
        return f"{heads}-{self.seqlen_q}x{self.seqlen_k}-d{self.head_dim}-{mask}"

    def problem(self, dtype: torch.dtype) -> Problem:
        shape = (self.batch, self.heads, self.heads_kv, self.seqlen_q, self.seqlen_k, self.head_dim)
        return Problem(*shape, dtype=str(dtype).removeprefix("torch."), band=self.band)


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of standard normal values, equal on every device and, up to rounding, in every dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, seqlen: int) -> Tensor:
        shape = (case.batch, heads, seqlen, case.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q = normal(case.heads, case.seqlen_q)
    return q, normal(case.heads_kv, case.seqlen_k), normal(case.heads_kv, case.seqlen_k)


# (D, Dv) with Dv other than D, and the masks that they are tested with.
OTHER_WIDTHS = ((64, 128), (128, 64), (192, 128), (40, 24), (256, 8), (72, 256), (192, 256))
OTHER_WIDTH_BANDS = (Band(), Band(None, 0), Band(100, 30))


def assert_error_within(name: str, value: Tensor, oracle: Tensor, low_precision: Tensor) -> None:
    """Assert the error rule for an output or a gradient, with the floor of its dtype."""
    assert value.shape == oracle.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(oracle.shape)}"
    if value.numel() == 0:
        return
    reference = oracle.double()
    floor = RELATIVE_FLOOR[value.dtype]
    error, yardstick = (value.double() - reference).abs(), (low_precision.double() - reference).abs()
    compared = (error, yardstick, reference.abs())
    measured = (measure(x) for measure in (torch.max, torch.mean) for x in compared)
    wrong, *numbers = together((~value.isfinite()).sum(), *measured)
    # Checked first, because comparisons with NaN are false.
    assert wrong == 0, f"{name}: {int(wrong)} entries are not finite"
    for measure, (found, rough, size) in zip(("max", "mean"), (numbers[:3], numbers[3:]), strict=True):
        allowed = 2 * rough + floor * size
        assert found <= allowed, f"{name}: {measure} error {found:.3e}, allowed {allowed:.3e}"


def together(*numbers: Tensor) -> list[float]:
    """The numbers as floats, in one copy from the GPU."""
    return torch.stack([x.double() for x in numbers]).tolist()


def assert_lse_close(lse: Tensor, oracle_lse: Tensor) -> None:
    assert lse.shape == oracle_lse.shape, f"lse: shape {tuple(lse.shape)}, expected {tuple(oracle_lse.shape)}"
    if lse.numel() == 0:
        return
    empty = oracle_lse == -torch.inf
    found, expected = (x.double().masked_fill(empty, 0.0) for x in (lse, oracle_lse))
    allowed = LSE_ATOL[lse.dtype] + LSE_RTOL[lse.dtype] * expected.abs()
    elsewhere = ((lse == -torch.inf) != empty).sum()
    differs, wrong, excess = together(elsewhere, (~found.isfinite()).sum(), ((found - expected).abs() - allowed).max())
    assert differs == 0, "lse: must be -inf exactly where a row sees no key"
    assert wrong == 0, "lse: not finite"
    assert excess <= 0, f"lse: beyond its tolerance by {excess:.3e}"


def assert_close(out: Tensor, lse: Tensor, oracle_out: Tensor, oracle_lse: Tensor, low_precision_out: Tensor) -> None:
    """Compare a forward pass with `reference.dense` and `reference.dense_low_precision`."""
    assert_lse_close(lse, oracle_lse)
    assert_error_within("out", out, oracle_out, low_precision_out)
    assert torch.all(out[oracle_lse == -torch.inf] == 0), "out: rows that see no key must be exactly 0"


def assert_is_attention(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, band: Band) -> None:
    """`assert_close`, which also computes the oracle and the yardstick, at the default scale."""
    low_precision_out, _ = reference.dense_low_precision(q, k, v, band)
    assert_close(out, lse, *reference.dense(q, k, v, band), low_precision_out)


def _deterministic() -> list[Case]:
    """Cases for deterministic gradients, with few K/V tiles and with more tiles than an H200 has SMs."""
    shapes = [(2, 8, 2, 1000, 1000, 64), (1, 4, 4, 3000, 5000, 128)]
    cases = [Case(*shape, band) for shape in shapes for band in (FULL, CAUSAL, Band(200, 100))]
    # Wide heads, and head dims between the widths of tiles.
    cases += [Case(1, 4, 2, 1000, 1500, d, band) for d in (192, 256) for band in (FULL, CAUSAL)]
    cases += [Case(1, 4, 2, 700, 900, 72, Band(100, 30))]
    # Blocks of queries without keys.
    cases += [Case(1, 4, 2, 300, 60, d, CAUSAL) for d in (64, 128, 192, 256)]
    return [*cases, Case(2, 40, 20, 700, 900, 128), Case(1, 2, 2, 4000, 4000, 64)]


def _unique(cases: list[Case]) -> list[Case]:
    return list({case.id: case for case in cases}.values())


def _small() -> list[Case]:
    lengths = [(1, 1), (1, 129), (17, 17), (17, 127), (127, 127), (127, 129), (129, 17), (129, 1)]
    bands = [FULL, CAUSAL, Band(5, None), Band(None, 3), Band(20, 9), Band(0, 0), Band(13, 0)]
    # Every length with a full, a causal and a window mask; every band with Sq < Sk, Sq > Sk and Sq = Sk.
    cases = [Case(1, 2, 2, sq, sk, 16, band) for sq, sk in lengths for band in (FULL, CAUSAL, Band(20, 9))]
    cases += [Case(2, 2, 1, sq, sk, 8, band) for sq, sk in ((17, 41), (41, 17), (33, 33)) for band in bands]
    heads = [(2, 2), (4, 2), (4, 1), (6, 3)]
    cases += [Case(2, h, kv, 29, 37, 24, band) for h, kv in heads for band in (CAUSAL, Band(4, 2))]
    empty = [Case(1, 2, 2, 5, 0, 8), Case(1, 2, 1, 0, 7, 8), Case(0, 2, 2, 4, 4, 8), Case(1, 0, 0, 4, 4, 8)]
    return _unique(cases + empty + [Case(1, 2, 2, 5, 0, 8, Band(1, 1)), Case(2, 2, 1, 0, 0, 8, CAUSAL)])


def _gpu() -> list[Case]:
    head_dims = (8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
    window = Band(100, 37)
    # Every head dim, with lengths that are not multiples of a tile and each kind of main loop.
    cases = [Case(2, 2, 2, 257, 391, d, band) for d in head_dims for band in (FULL, CAUSAL, window)]
    cases += [Case(1, 2, 1, 1000, 1000, d, CAUSAL) for d in head_dims]
    # Lengths around the edges of a tile, for the two most common head dims.
    lengths = [(1, 1), (17, 17), (127, 127), (128, 128), (129, 129), (255, 257)]
    lengths += [(513, 1025), (1025, 513), (1, 1000), (1000, 1)]
    for sq, sk in lengths:
        cases += [Case(1, 2, 2, sq, sk, d, band) for d in (64, 128) for band in (FULL, CAUSAL)]
    # Every kind of window, with Sq < Sk, Sq > Sk and Sq = Sk.
    bands = [Band(0, 0), Band(64, None), Band(None, 64), Band(64, 0), Band(1, 200), Band(5000, 5000)]
    shapes = [(1, 2, 2, 300, 555, 64), (1, 2, 2, 555, 300, 128), (1, 2, 1, 384, 384, 64)]
    cases += [Case(*shape, band) for shape in shapes for band in bands]
    # Grouped heads, and grids with many batches, many heads or long sequences.
    for heads, heads_kv in ((4, 2), (8, 1), (6, 3)):
        cases += [Case(2, heads, heads_kv, 200, 331, 128, band) for band in (FULL, CAUSAL)]
    cases += [Case(2, 8, 2, 130, 700, 64, window), Case(17, 5, 5, 65, 65, 64, CAUSAL)]
    cases += [Case(1, 33, 11, 64, 192, 96), Case(1, 1, 1, 4097, 4097, 64, CAUSAL)]
    cases += [Case(1, 2, 1, 2048, 2048, 128), Case(1, 1, 1, 3, 8193, 128)]
    # Few queries of grouped heads, as in decoding: pack_gqa.
    cases += [Case(2, 16, 2, 1, 700, 128, band) for band in (FULL, CAUSAL, Band(100, 0))]
    cases += [Case(2, 12, 3, rows, 333, d, CAUSAL) for d in (64, 128, 256) for rows in (5, 33, 100)]
    cases += [Case(1, 8, 1, 40, 20, 64, CAUSAL), Case(3, 8, 2, 60, 500, 96, window)]
    # Many more tiles than SMs, so that persistent CTAs compute several; some tiles see no key.
    for d in (64, 96, 128, 192, 256):
        cases += [Case(4, 40, 8, 300, 150, d, band) for band in (FULL, CAUSAL, Band(30, 20))]
    # The same for K/V tiles, for the gradients.
    for d in (64, 96, 128, 256):
        cases += [Case(4, 16, 16, 300, 400, d, band) for band in (FULL, CAUSAL, Band(100, 30))]
    cases += [Case(1, 6, 3, 1500, 7000, 64), Case(1, 6, 3, 1500, 7000, 128)]
    # Tiles for more keys than the cases above have.
    cases += [Case(1, 2, 1, 130, 2600, d, band) for d in (64, 96, 256) for band in (FULL, CAUSAL, window)]
    cases += [Case(2, 20, 4, 700, 2300, 80, band) for band in (FULL, CAUSAL, Band(1000, 30))]
    # Empty calls, and a call in which 996 of 999 queries see no key.
    cases += [Case(1, 2, 2, 5, 0, 64), Case(1, 2, 1, 0, 7, 64), Case(0, 2, 2, 4, 4, 64)]
    cases += [Case(1, 2, 2, 999, 3, 64, CAUSAL)]
    return _unique(cases)


SMALL = _small()
GPU = _gpu()
DETERMINISTIC = _deterministic()
