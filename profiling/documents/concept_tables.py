"""The tables of docs/how-it-works.md, from the models of the package: no measurement is read."""

from __future__ import annotations

from cute_flash.planning.plan import plan_forward
from cute_flash.smem.tile import WAVEFRONT_BYTES
from cute_flash.spec import arch
from cute_flash.spec.arch import KIB
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline
from layouts.studies import loop_order, tile_choice
from profiling.measure.tables import Table

# GPU -> GB of device memory; the A100 is the one with 2 TB/s.
HBM_GB = {"A100": 80, "H100": 80, "H200": 141}
LENGTHS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192), (64, 128)


def chips() -> Table:
    """Sizes, bandwidths and ridge of three GPUs."""
    columns = (
        "GPU", "SMs", "shared memory of an SM", "of all SMs", "shared memory, TB/s", "L2", "HBM", "HBM, TB/s",
        "16-bit TFLOP/s", "ridge, FLOP/B",
    )  # fmt: skip
    rows = []
    for name, capacity in HBM_GB.items():
        spec = arch.GPUS[name]
        # An SM delivers one wavefront in a clock.
        smem_tbps = WAVEFRONT_BYTES * spec.num_sms * spec.clock_ghz / 1e3
        sizes = (f"{spec.smem_per_sm // KIB} KB", f"{spec.smem_per_sm * spec.num_sms / (1 << 20):.1f} MB")
        memory = (f"{spec.l2_bytes >> 20} MB", f"{capacity} GB", f"{spec.hbm_tbps:g}")
        compute = (f"{spec.tensor_tflops:.0f}", f"{spec.ridge:.0f}")
        rows.append((name, str(spec.num_sms), *sizes, f"{smem_tbps:.0f}", *memory, *compute))
    return Table("", columns, tuple(rows))


def shapes() -> Table:
    """FLOPs, memory and traffic of one head, unfused and fused, for the lengths and head dims of the explanations."""
    columns = (
        "N, d", "GFLOP", "S and P", "Q, K, V, O", "ratio", "unfused traffic", "fused, no cache", "fused, least",
        "FLOP/B unfused", "FLOP/B fused",
    )  # fmt: skip
    rows = []
    for head_dim in HEAD_DIMS:
        for n in LENGTHS:
            problem = Problem(1, 1, 1, n, n, head_dim, "bfloat16")
            tile_m = plan_forward(problem, arch.SM_80).tile.tile_m
            flops, least = roofline.flops(problem), roofline.hbm_bytes(problem)
            unfused = roofline.standard_bytes(problem)
            scores, tensors = 2 * 2 * n * n, 4 * 2 * n * head_dim
            sizes = (scores, tensors)
            traffic = (unfused, roofline.fa_bytes(problem, tile_m), least)
            rows.append(
                (
                    f"{n}, {head_dim}",
                    f"{flops / 1e9:.2f}",
                    *(f"{size / 1e6:.1f} MB" for size in sizes),
                    f"{scores / tensors:.0f}",
                    *(f"{size / 1e6:.1f} MB" for size in traffic),
                    f"{flops / unfused:.0f}",
                    f"{flops / least:.0f}",
                )
            )
    return Table("", columns, tuple(rows))


def _compact(table: str) -> str:
    """The table with its first column aligned to the right too: the site does not wrap such cells."""
    return table.replace("| --- |", "| ---: |", 1)


def loop_orders() -> str:
    """Bytes, rescales and least time of both loop orders on an A100, B = 1 and H = 16."""
    return _compact(loop_order.markdown_table(arch.SM_80, LENGTHS, HEAD_DIMS))


def tile_rules() -> str:
    """The largest K/V block that each rule allows, and the tiles that follow from the rules."""
    return _compact(tile_choice.markdown_table()).replace("K/V stage", "stage")
