"""A few small launches of every kernel family for compute-sanitizer, which slows a kernel a thousandfold.

compute-sanitizer --tool memcheck  python -m tests.gpu.small_case
compute-sanitizer --tool racecheck python -m tests.gpu.small_case
"""

import functools
import itertools

import torch

import cute_flash
from cute_flash.spec.band import Band
from tests import cases
from tests.gpu import families
from tests.gradients import assert_gradients, weighted

SMALL = (
    cases.Case(1, 2, 1, 150, 200, 64, Band(None, 0)),
    cases.Case(1, 1, 1, 77, 130, 96, Band()),
    cases.Case(1, 2, 2, 129, 129, 128, Band(40, 0)),
    cases.Case(1, 1, 1, 70, 90, 192, Band(None, 0)),
    cases.Case(1, 1, 1, 70, 90, 256, Band(20, 10)),
    cases.Case(1, 1, 1, 300, 60, 72, Band(None, 0)),
    # More tiles than an H200 has SMs: persistent CTAs compute several.
    cases.Case(1, 140, 2, 40, 70, 64, Band(None, 0)),
    cases.Case(1, 140, 2, 40, 70, 128, Band()),
    # The same for the K/V tiles of the backward.
    cases.Case(1, 68, 68, 40, 200, 64, Band(None, 0)),
    cases.Case(1, 68, 68, 70, 200, 128, Band()),
)


def check_gradients(case: cases.Case, inputs: tuple[torch.Tensor, ...]) -> None:
    window = (case.band.left, case.band.right)
    loss = weighted(torch.randn(inputs[0].shape, device="cuda"))
    for deterministic in (False, True):
        options = {"window": window, "return_lse": True, "deterministic": deterministic}
        assert_gradients(functools.partial(cute_flash.attn, **options), inputs, case.band, loss)
        print("gradients", "deterministic" if deterministic else "", case.id, "ok", flush=True)


def main() -> None:
    for family, case in itertools.product(families.runnable(), SMALL):
        q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
        with families.chosen(family):
            out, lse = cute_flash.attn(q, k, v, window=(case.band.left, case.band.right), return_lse=True)
            cases.assert_is_attention(out, lse, q, k, v, case.band)
            print(family, case.id, "ok", flush=True)
            if case.heads < 100:
                check_gradients(case, (q, k, v))


if __name__ == "__main__":
    main()
