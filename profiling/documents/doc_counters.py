"""Tables of the counters of Nsight Compute, from the record of `python -m profiling ncu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cute_flash.planning.plan import plan_backward
from cute_flash.smem.tile import VARIANTS
from cute_flash.spec import arch
from layouts.backward import bwd_sm80_uses
from layouts.kernels import predict
from profiling.counters import ncu_source
from profiling.counters.expect import work_of
from profiling.counters.ncu_case import BEYOND_L2, LAYOUTS, case_of, is_beyond_l2, measured_cases
from profiling.documents.sources import BY_INSTRUCTION, COUNTERS
from profiling.measure.shapes import Shape
from profiling.measure.tables import Table, number

Case = dict[str, Any]
Record = dict[str, Any]
# Column -> the counter of the use of a unit, in percent.
UNITS = {
    "tensor cores": "tensor_percent",
    "XU (exp2)": "xu_percent",
    "FMA": "fma_percent",
    "ALU": "alu_percent",
    "shared memory": "lsu_data_percent",
    "issue slots": "issue_percent",
}
# Column -> opcode of its instructions.
OPCODES = {"ldmatrix": "LDSM", "loads": "LDS", "stmatrix": "STSM", "stores": "STS", "cp.async": "LDGSTS"}


def _cases(record: Record, direction: str) -> list[Case]:
    cases = measured_cases(record)
    return [case for case in cases if case["kernel"].startswith(direction) and not is_beyond_l2(case)]


def _is_default(case: Case) -> bool:
    return case["layout"] == LAYOUTS[case["kernel"]][0]


def _both(case: Case, metric: str) -> str:
    """measured (predicted)."""
    return f"{number(case['measured'][metric], ',.0f')} ({number(case['predicted'][metric], ',.0f')})"


def _name(case: Case) -> str:
    return f"{case['kernel']}, {case['shape']['head_dim']}"


def _head(case: Case) -> tuple[str, ...]:
    """The first cells of a row: kernel, layout with a link to its report, and time."""
    report = Path(COUNTERS).parent / Path(case["report"]).with_suffix(".txt")
    return _name(case), f"[{case['layout']}]({report})", f"{case['measured']['duration_ns'] / 1e3:.1f}"


def _by_instruction_or(case: Case, metric: str, unit: str) -> str:
    """A counter of the mma.sync kernels; in the wgmma kernels `unit` does this work."""
    return _both(case, metric) if case["kernel"].endswith("sm80") else unit


def layouts(record: Record) -> Table:
    rows = [
        (
            *_head(case),
            _by_instruction_or(case, "sass_ldsm_conflicts", "wgmma"),
            _both(case, "st_conflicts"),
            _by_instruction_or(case, "sass_ldgsts_wavefronts", "TMA"),
        )
        for case in _cases(record, "fwd")
    ]
    counted = ("ldmatrix conflicts", "store conflicts", "cp.async wavefronts")
    return Table("", ("kernel, D", "layout", "time, us", *counted), tuple(rows))


def bwd_layouts(record: Record) -> Table:
    """The backward kernels, which are built swizzled only; other layouts of the mma.sync kernel are predictions."""
    rows = []
    for case in _cases(record, "bwd"):
        counters = ("ld_conflicts", "ld_wavefronts", "st_conflicts", "st_wavefronts")
        rows.append(
            (
                *_head(case),
                _by_instruction_or(case, "sass_ldsm_conflicts", "wgmma"),
                *(_both(case, metric) for metric in counters),
                _by_instruction_or(case, "sass_ldgsts_wavefronts", "TMA"),
            )
        )
        if case["kernel"] == "bwd-sm80":
            rows += [_predicted_backward(case, layout) for layout in VARIANTS[1:]]
    counted = ("ldmatrix conflicts", "load conflicts", "load wavefronts", "store conflicts", "store wavefronts")
    return Table("", ("kernel, D", "layout", "time, us", *counted, "cp.async wavefronts"), tuple(rows))


def _predicted_backward(case: Case, layout: str) -> tuple[str, ...]:
    """The row of a layout that the mma.sync backward is not built with."""
    plan = plan_backward(Shape(**case["shape"]).problem(case["dtype"]), arch.by_name("sm_90"), family="sm80")
    count = predict(bwd_sm80_uses(plan.tile, layout), work_of(plan))
    loads, stores = count["ldmatrix"] + count["ld.shared"], count["st.shared"]
    values = (count["ldmatrix"].conflicts, loads.conflicts, loads.wavefronts, stores.conflicts, stores.wavefronts)
    return _name(case), f"{layout}, not built", "-", *(f"({v:,})" for v in (*values, count["cp.async"].wavefronts))


def by_instruction(text: str) -> Table:
    """Shared-memory wavefronts by instruction of the backward kernels, from printed tables."""
    rows = []
    for case_id, counted in ncu_source.read_tables(text).items():
        case = case_of(case_id)
        cells = []
        for opcode in OPCODES.values():
            of_opcode = [count for name, count in counted.items() if name.partition(".")[0] == opcode]
            total = sum(of_opcode, ncu_source.Counted())
            cells.append(f"{total.wavefronts:,} ({total.ideal:,})" if total.executed else "-")
        rows.append((f"[{case.kernel}]({BY_INSTRUCTION}), {case.shape.head_dim}", *cells))
    return Table("", ("kernel, D", *OPCODES), tuple(rows))


def hbm_bytes(record: Record) -> Table:
    """DRAM bytes of every kernel with its default layout, in MB."""
    rows = []
    for case in filter(_is_default, measured_cases(record)):
        shape, predicted, measured = case["shape"], case["predicted"], case["measured"]
        name = f"{case['kernel']}, B {shape['batch']}, H {shape['heads']}, S {shape['seqlen']}, D {shape['head_dim']}"
        values = [
            value
            for metric, once in (("dram_read_bytes", "least_read_bytes"), ("dram_write_bytes", "output_bytes"))
            for value in (predicted[once], predicted[metric], measured[metric])
        ]
        rows.append((name, *(number(value and value / 1e6, ".1f") for value in values)))
    columns = [
        f"{word}: {what}" for word in ("read", "written") for what in ("every tensor once", "L2 model", "measured")
    ]
    return Table("", ("MB", *columns), tuple(rows))


def beyond_l2(record: Record) -> str:
    """HBM bytes over the model for a shape whose outputs exceed L2."""
    kernels = {case["kernel"]: case for case in measured_cases(record) if is_beyond_l2(case)}
    shape = ", ".join(f"{name} {value}" for name, value in BEYOND_L2.items())

    def over_model(metric: str) -> str:
        ratios = {name: case["measured"][metric] / case["predicted"][metric] for name, case in kernels.items()}
        return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())

    return (
        f"Measured over the L2 model, for a shape whose outputs exceed L2 ({shape}): written bytes "
        f"{over_model('dram_write_bytes')}; read bytes {over_model('dram_read_bytes')}."
    )


def _stalls(case: Case) -> str:
    stalls = case["stalls"] or {}
    total = sum(stalls.values())
    longest = sorted(stalls.items(), key=lambda stall: -stall[1])[:2]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in longest) or "-"


def limits(record: Record) -> Table:
    """Use of the hardware units and stall reasons of each kernel with its default layout."""
    rows = []
    for case in filter(_is_default, _cases(record, "")):
        measured, peak = case["measured"], arch.H200.tensor_tflops
        speed = f"{case['tflops']:.0f} ({case['tflops'] / peak:.0%})"
        units = [f"{measured[metric]:.0f} %" for metric in UNITS.values()]
        warps = f"{16 * measured['occupancy_percent'] / 100:.1f}"
        rows.append((_name(case), speed, *units, warps, _stalls(case)))
    columns = ("kernel, D", "TFLOP/s (of 989)", *UNITS, "warps a scheduler", "stall reasons")
    return Table("", columns, tuple(rows))
