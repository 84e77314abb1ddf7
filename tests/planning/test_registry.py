"""The registry of kernels: classes exist, and operands have unique names."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from cute_flash.planning.registry import KERNELS

SCALARS = ("f32", "i32", "i64")
LAYOUTS = ("rows", "statistics", "compact", "strided")
KINDS = (
    "tile_list", "dq_accum", "bias", "dbias", "captures", "scalars", "dcaptures", "dcapture_terms", "fwd_block_indices",
    "bwd_block_indices", "pieces", "rotary", "partial_out", "partial_stats", "partials", "partial_lses",
    "first_rows",
)  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_operands_have_unique_names_and_known_types(name: str) -> None:
    kernel = KERNELS[name]
    assert len(set(kernel.names)) == len(kernel.operands)
    for operand in kernel.operands:
        layout, _, element = operand.type.partition(" ")
        assert layout in (LAYOUTS if element else (*SCALARS, *KINDS)), operand
        assert bool(operand.dims) or layout not in LAYOUTS


def test_an_operand_has_one_type_in_all_kernels() -> None:
    types: dict[str, str] = {}
    for kernel in KERNELS.values():
        for operand in kernel.operands:
            if operand.name != "block_indices":  # the forward has K/V blocks, the backward m_blocks
                assert types.setdefault(operand.name, operand.type) == operand.type


# Modules in which a kernel reads its operands: those of its class and base classes, and of score features.
HOPPER_BWD = ("bwd_sm90", "bwd_sm90_wide", "bwd_sm90_cluster")
ATTENTION = ("fwd_sm80", "fwd_sm80_fp32", "fwd_sm90", "fwd_sm90_wide", "bwd_sm80", "bwd_sm80_fp32", *HOPPER_BWD)
READERS = {
    **dict.fromkeys(ATTENTION, ("common.kernel", "common.params")),
    **{name: ("common.kernel", "common.params", "sm80.kernel") for name in ATTENTION if "sm80" in name},
    **{name: ("common.kernel", "common.params", "sm90.bwd_storage", "sm90.bwd_wide") for name in HOPPER_BWD},
    "bwd_sm90": ("common.kernel", "common.params", "sm90.bwd_storage"),
    "bwd_preprocess": ("common.kernel",),
    "bwd_preprocess_fp32": ("common.kernel",),
    "bwd_postprocess_sm80": ("common.kernel", "common.postprocess"),
    "bwd_postprocess_sm90": ("common.kernel", "common.postprocess"),
    "bwd_sum_dbias": ("common.kernel",),
    "decode": ("common.kernel",),
    "decode_latent": ("common.kernel",),
    "decode_latent_sm90": ("common.kernel", "decode.kernel"),
    "fwd_split_kv": ("common.kernel",),
    "merge_partials": ("common.kernel",),
    "varlen_scheduler_fwd": (),
    "varlen_scheduler_bwd": (),
}
# A CTA of the wide backward, or a cluster, has one tile.
UNUSED = {name: {"tile_counter"} for name in HOPPER_BWD[1:]}


def operands_read(module: str, *objects: str) -> set[str]:
    """Attributes of some local variables of a module, read from its source, because importing the DSL takes seconds."""
    spec = find_spec(f"cute_flash.kernels.{module}")
    assert spec is not None and spec.origin is not None
    nodes = ast.walk(ast.parse(Path(spec.origin).read_text()))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in attributes if node.value.id in objects}  # type: ignore[attr-defined]


# Split kernels read tensors and pieces by name, in a loop.
SPLIT = ("split_fp32_fwd", "split_fp32_bwd")


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in SPLIT])
def test_a_kernel_reads_all_operands_of_its_row(name: str) -> None:
    module, _class_name = KERNELS[name].path.split(":")
    read = set().union(*(operands_read(one, "args", "p") for one in (module, *READERS[name])))
    # Kernels read the pieces of x under the name x.
    names = {operand.removesuffix("_pieces") for operand in KERNELS[name].names}
    assert names - read == UNUSED.get(name, set())


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_kernel_has_pieces_of_every_tensor(name: str) -> None:
    """In the order of the norms; the attention kernel of the same direction reads the same pieces and norms."""
    tensors = [operand for operand in KERNELS[name].operands if operand.type.startswith("rows")]
    pieces = [operand for operand in KERNELS[name].operands if operand.type == "pieces"]
    assert [operand.name for operand in pieces] == [f"{operand.name}_pieces" for operand in tensors]
    assert [operand.dims for operand in pieces] == [operand.dims[:-1] for operand in tensors]
    others = {"norms", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"}
    assert set(KERNELS[name].names) == {operand.name for operand in (*tensors, *pieces)} | others
    attention = KERNELS[f"{name.removeprefix('split_fp32_')}_sm80_fp32"]
    assert {operand for operand in attention.operands if operand.type == "pieces"} == set(pieces)
    assert "norms" in attention.names


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_reads_no_operand_that_its_row_lacks(name: str) -> None:
    module, _class_name = KERNELS[name].path.split(":")
    rows = [kernel for kernel in KERNELS.values() if kernel.path == KERNELS[name].path]
    assert operands_read(module, "args") <= {operand for kernel in rows for operand in kernel.names}
