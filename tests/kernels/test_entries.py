"""The entries of the kernels: their operands, and the fake arguments that they are compiled with."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_flash.kernels.common.fakes import fake_arguments
from cute_flash.planning.decode import DecodeStatic
from cute_flash.planning.decode_tiles import decode_tile, latent_tile
from cute_flash.planning.latent_sm90 import latent_tile_sm90
from cute_flash.planning.merge import MergeStatic, MergeTile
from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.planning.registry import KERNELS
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.mod_spec import ModSpec
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.features import FEATURES
from cute_flash.spec.problem import Problem, Static

SHIFT = 0.5
WITH_SCALAR = ModSpec(BoundMods.of(lambda score, b, h, q_idx, kv_idx: score + SHIFT, None, None).graphs)


def tile_of(kernel: str) -> Any:
    """The tile of an attention kernel."""
    plan = plan_backward if kernel.startswith("bwd") or kernel.endswith("bwd") else plan_forward
    return plan(Problem(2, 4, 2, 100, 200, 64), ARCHS["sm_80" if "sm80" in kernel else "sm_90"]).main.tile


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_entry_is_compiled_for_the_operands_of_its_row_by_name_and_in_order(kernel: str) -> None:
    module, name = KERNELS[kernel].path.split(":")
    entry = getattr(importlib.import_module(f"cute_flash.kernels.{module}"), name).__call__
    assert list(inspect.signature(entry).parameters) == ["self", "stream", "operands"]
    static: Any = Static("bfloat16", 64)
    tile: Any
    if kernel in ("decode", "fwd_split_kv"):
        static = DecodeStatic("bfloat16", 64, heads_first=kernel == "fwd_split_kv")
        tile = decode_tile(static, 4, 8, ARCHS["sm_90"])
    elif kernel.startswith("decode_latent"):
        static = DecodeStatic("bfloat16", 576, head_dim_v=512, is_latent=True)
        is_wgmma = kernel.endswith("sm90")
        tile = latent_tile_sm90(static, ARCHS["sm_90"]) if is_wgmma else latent_tile(static, 16, ARCHS["sm_90"])
    elif kernel == "merge_partials":
        static, tile = MergeStatic("bfloat16", 64, 3), MergeTile()
    else:
        tile = tile_of(kernel)
    fakes = fake_arguments(CompileKey.of(kernel, static, tile, "sm_90a"))
    assert list(fakes) == ["stream", *KERNELS[kernel].names]


@pytest.mark.parametrize("kernel", ["fwd_sm80", "fwd_sm90", "bwd_sm80", "bwd_sm90"])
def test_a_plain_kernel_takes_no_operand_of_a_feature(kernel: str) -> None:
    key = CompileKey.of(kernel, Static("bfloat16", 64), tile_of(kernel), "sm_90a")
    features = {operand.name for feature in FEATURES for operand in (*feature.fwd, *feature.bwd)}
    absent = {x.name for x in KERNELS[kernel].operands if not key.takes(x)}
    assert absent >= features & set(KERNELS[kernel].names)


@pytest.mark.parametrize(
    ("kernel", "static", "names"),
    [
        ("fwd_sm90", Static("bfloat16", 64, features=("softcap",)), {"softcap"}),
        ("fwd_sm80", Static("bfloat16", 64, features=("score_mod",), mods=ModSpec()), set()),
        ("fwd_sm80", Static("bfloat16", 64, features=("score_mod",), mods=WITH_SCALAR), {"scalars"}),
        ("bwd_sm80", Static("bfloat16", 64, features=("alibi",)), {"alibi_slopes", "dalibi_partial"}),
        ("bwd_sm80", Static("bfloat16", 64, deterministic=True), {"dq_progress"}),
        ("bwd_sm90", Static("bfloat16", 64, deterministic=True), set()),
        ("bwd_sm90", Static("bfloat16", 64, varlen=True), {"kv_tile_list"}),
        ("fwd_sm90", Static("bfloat16", 64, block_sparse=True), {"block_indices"}),
        ("bwd_preprocess", Static("bfloat16", 64, has_dlse=True), {"dlse"}),
    ],
)
def test_features_geometry_and_policy_add_their_operands(kernel: str, static: Static, names: set[str]) -> None:
    one, plain = (CompileKey.of(kernel, x, tile_of(kernel), "sm_90a") for x in (static, Static("bfloat16", 64)))
    added = [x.name for x in KERNELS[kernel].operands if one.takes(x) and not plain.takes(x)]
    assert set(added) == names
