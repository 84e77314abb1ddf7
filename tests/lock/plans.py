"""The launch plans of the published shapes: grids, L2 groups and workspace, which machine code does not show.

`python -m tests.lock.plans` writes plans.json, and a test compares it with today's plans. Names have the form of the
lock's cases, so that one pattern selects kernels and plans.
"""

from __future__ import annotations

import json
from pathlib import Path

from cute_flash.planning.plan import Plan, plan_backward, plan_forward
from cute_flash.spec.arch import H200
from cute_flash.spec.family import FAMILIES
from profiling.bench.suites import SUITES
from profiling.measure.shapes import Shape

RECORDED = Path(__file__).with_name("plans.json")
PUBLISHED = ("paper", "gqa", "gqa8")
# Other sizes follow from these and the shape.
SIZES = ("num_tiles", "num_ctas", "heads_per_l2_group")
PLANS = {"fwd": plan_forward, "bwd": plan_backward}


def name_of(direction: str, family: str, shape: Shape) -> str:
    rest = shape.id.partition(f"{shape.mask}-")[2]
    return f"{direction}/{family}/{H200.name}/d{shape.head_dim}/bf16/{shape.mask}/plain/{rest}"


def text_of(plan: Plan) -> str:
    sizes = ", ".join(f"{name}={plan.sizes[name]}" for name in SIZES)
    return "; ".join([sizes, *(f"{buffer.name}{buffer.shape}" for buffer in plan.workspace)])


def plans() -> dict[str, str]:
    """The plans of all published shapes on an H200, by name."""
    shapes = [shape for suite in PUBLISHED for shape in SUITES[suite].shapes()]
    return {
        name_of(direction, family, shape): text_of(plan(shape.problem("bf16"), H200, family=family))
        for direction, plan in PLANS.items()
        for family in FAMILIES
        for shape in shapes
    }


def main() -> None:
    RECORDED.write_text(json.dumps(plans(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
