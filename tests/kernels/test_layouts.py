"""Other shared-memory layouts: a field of the tile that changes only addresses. Layouts that the hardware cannot read
are refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_flash.errors import UnsupportedError
from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.plan import CompileKey, plan_forward
from cute_flash.planning.tiles.fwd_sm80 import SM80_FWD, FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD, FwdTileSm90
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem
from layouts import HOPPER_VARIANTS, VARIANTS, sm80_uses, sm90_uses
from tests.jit.gates import kernel_resources


def key_of(family: str, head_dim: int, layout: str) -> CompileKey:
    key = plan_forward(Problem(2, 8, 8, 2048, 2048, head_dim), ARCHS["sm_90"], family).main
    return replace(key, tile=replace(key.tile, layout=layout))  # type: ignore[call-arg]


def test_the_tables_are_swizzled() -> None:
    rows = [*(row for rows in SM80_FWD.values() for row in rows), *SM90_FWD]
    assert {row.layout for row in rows} == {"swizzled"}


@pytest.mark.parametrize("layout", ["padded", "plain"])
def test_hopper_refuses_what_wgmma_cannot_read(layout: str) -> None:
    with pytest.raises(UnsupportedError, match=f"layout='{layout}': TMA and wgmma use.*interleaved"):
        FwdTileSm90(128, 128, 128, 2, layout=layout)


def test_ampere_refuses_what_is_not_built() -> None:
    with pytest.raises(UnsupportedError, match=r"layout='interleaved'.*swizzled, padded, plain"):
        FwdTileSm80(128, 128, 48, 4, 2, layout="interleaved")


def test_padding_takes_room() -> None:
    tile = FwdTileSm80(128, 128, 48, 4, 2)
    padded, plain = replace(tile, layout="padded"), replace(tile, layout="plain")
    assert plain.smem_bytes == tile.smem_bytes == (128 + 4 * 48) * 256
    # 16 bytes for each row except the last of a tile; the next tile starts at a multiple of 1024.
    stages = 2 * (47 * 272 + 256)
    assert padded.smem_bytes == 34 * 1024 + -(-stages // 1024) * 1024 + stages
    assert "padded" in str(padded) and "swizzled" not in str(tile)


@pytest.mark.kernels("fwd_sm80", "layouts")
@pytest.mark.compiles
@pytest.mark.skipif(nvdisasm() is None, reason="no nvdisasm")
@pytest.mark.parametrize("layout", VARIANTS)
def test_ampere_variants_are_the_same_kernel(layout: str) -> None:
    """A layout changes addresses only: the kernel has the instructions that layouts.kernels counts."""
    key = key_of("sm80", 64, layout)
    assert isinstance(key.tile, FwdTileSm80)
    found, warps = kernel_resources(key), key.tile.num_warps
    assert found.spill_bytes == 0
    assert found.symbol.endswith("128x64_0" if layout == "swizzled" else f"128x64_{layout}_0")
    # The code of a warp has two copies of the K/V loop: masked and full blocks.
    loads = sum(
        use.once.instructions * (2 if use.is_per_block else 1) // warps
        for use in sm80_uses(key.tile)
        if use.instruction == "ldmatrix"
    )
    (stores,) = (use for use in sm80_uses(key.tile) if use.instruction == "st.shared")
    assert found.sass["LDSM"] == loads
    assert found.sass["STS"] == stores.once.instructions // warps


@pytest.mark.kernels("fwd_sm90", "layouts")
@pytest.mark.compiles
@pytest.mark.skipif(nvdisasm() is None, reason="no nvdisasm")
@pytest.mark.parametrize("layout", HOPPER_VARIANTS)
def test_hopper_variants_differ_in_the_boxes_of_tma(layout: str) -> None:
    key = key_of("sm90", 128, layout)
    assert isinstance(key.tile, FwdTileSm90)
    found = kernel_resources(key)
    assert found.spill_bytes == 0 and not found.serialised_wgmma
    # A box is as wide as an atom: 128, 64, 32 or 16 bytes of a row of 256. Q for each warpgroup, K twice, V.
    boxes = 256 // {"swizzled": 128, "swizzled64": 64, "swizzled32": 32, "interleaved": 16}[layout]
    assert found.sass["UTMALDG"] == boxes * (2 + 2 + 1)
    assert found.sass["UTMASTG"] == boxes * 2
    (stores,) = (use for use in sm90_uses(key.tile) if use.instruction == "stmatrix")
    # Two places in the code write the output, by 4 warps per warpgroup.
    assert found.sass["STSM"] == 2 * stores.once.instructions // (4 * key.tile.num_warpgroups)
