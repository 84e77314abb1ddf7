"""The generated function of a plan: its source, its tracebacks, and the objects that it keeps."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash.planning import plan as planning
from cute_flash.planning.plan import CompileKey, plan_forward
from cute_flash.planning.registry import KERNELS
from cute_flash.runtime import launcher
from cute_flash.runtime.binder import bind_forward, source_of
from cute_flash.runtime.gpu import Gpu, bound, current_gpu, use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.describe import describe
from cute_flash.spec.features import Operand
from tests.fakes.gpu import FakeGpu
from tests.runtime.calls import inputs, plain, run_backward, run_forward

ROOT = Path(__file__).parents[2]


def last_bound() -> Callable[..., Any]:
    return next(reversed(bound.values()))


def test_the_source_of_a_plain_call(sm_90: FakeGpu) -> None:
    run_forward(inputs(heads_kv=4), plain(right=0))
    source = source_of(last_bound())
    assert "def forward(q, k, v, args):" in source
    call = next(line for line in source.splitlines() if line.strip().startswith("fwd_sm90("))
    assert len(call.split("(", 1)[1].split(",")) == len(KERNELS["fwd_sm90"].operands)
    # Operands of features are absent, not looked up.
    assert call.rstrip().endswith("None)")


def test_calls_that_differ_in_values_share_one_source(gpu: FakeGpu) -> None:
    functions = []
    for sk in (9, 10):
        run_forward(inputs(sk=sk))
        functions.append(last_bound())
    assert functions[0].__code__ is functions[1].__code__
    run_forward(inputs(), plain(softcap=1.0))
    assert last_bound().__code__ is not functions[0].__code__


def test_an_operand_without_a_value_is_an_error(sm_90: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any launch: a kernel that takes an operand must get one."""
    spec = KERNELS["fwd_sm90"]
    # Without its cache, which would keep the launches of this test for others.
    monkeypatch.setattr(planning, "_fwd_launches", planning._fwd_launches.__wrapped__)
    monkeypatch.setitem(KERNELS, "fwd_sm90", spec._replace(operands=(*spec.operands, Operand("forgotten", "i32"))))
    with pytest.raises(LookupError, match="the operand forgotten of fwd_sm90 has no value"):
        launcher.forward(*inputs(), plain())
    assert not sm_90.launches
    unused = Operand("forgotten", "i32", when=lambda key: False)
    monkeypatch.setitem(KERNELS, "fwd_sm90", spec._replace(operands=(*spec.operands, unused)))
    plan = plan_forward(describe(*inputs(), plain(), "cuda"), ARCHS["sm_90"])
    assert "None)" in source_of(bind_forward(plan, torch.device("cpu"), False, False))


# Adds a score feature before the registry is imported, then prints what each launch gets.
TOY_FEATURE = """
import torch
from cute_flash.spec import features
def toy_value(args):
    return 2 * args.softcap
toy = features.Operand("toy", "f32", value=toy_value)
buffers = lambda facts: (features.Buffer("dtoy", (facts.problem.heads,), init="zeros"),)
gradient = features.Gradient("alibi", "toy_gradient", buffers)
row = features.FeatureSpec("toy", lambda args: args.softcap == 7.0, 1, (toy,), (toy,), gradient)
features.FEATURES += (row,)
features.FEATURE["toy"] = row
from cute_flash.runtime import finalizers, launcher
def toy_gradient(dtoy):
    return dtoy + 1
finalizers.toy_gradient = toy_gradient
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.args import AttentionArgs
from tests.fakes.recording import RecordingGpu
class Gpu(RecordingGpu):
    def kernel(self, key):
        def launch(*arguments):
            named = dict(zip(key.operands, arguments, strict=True))
            if "toy" in named:
                print(key.kernel, named["toy"])
        return launch
q = torch.empty(1, 4, 700, 64, dtype=torch.bfloat16)
for arch in ("sm_80", "sm_90"):
    for softcap in (3.0, 7.0):
        args = AttentionArgs(scale=1.0, softcap=softcap)
        with use_gpu(Gpu(ARCHS[arch])):
            out, lse, _ = launcher.forward(q, q, q, args)
            grads = launcher.backward(out, None, q, q, q, out, lse, args)[3]
            print([None if x is None else x.tolist() for x in grads])
"""


@pytest.mark.processes
def test_a_new_row_reaches_every_launch_and_its_gradient() -> None:
    """Of both families and directions; nothing else on the host has to change."""
    done = subprocess.run([sys.executable, "-c", TOY_FEATURE], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = []
    for family in ("sm80", "sm90"):
        expected += [f"fwd_{family} None", f"bwd_{family} None", "[None, None, None]"]
        expected += [f"fwd_{family} 14.0", f"bwd_{family} 14.0", "[[1.0, 1.0, 1.0, 1.0], None, None]"]
    assert done.stdout.splitlines() == expected


def test_tracebacks_show_the_generated_lines() -> None:
    class Failing(FakeGpu):
        def kernel(self, key: CompileKey) -> Callable[..., None]:
            def launch(*arguments: Any) -> None:
                raise RuntimeError("an illegal memory access was encountered")

            return launch

    with use_gpu(Failing("sm_90")), pytest.raises(RuntimeError, match="illegal memory access") as error:
        launcher.forward(*inputs(heads_kv=4), plain())
    assert "fwd_sm90(q, k, v, out, lse, scale" in "".join(traceback.format_exception(error.value))


def test_bound_functions_hold_no_tensor_and_no_address(gpu: FakeGpu) -> None:
    """They may run on any stream, and inside a captured graph."""
    run_forward(inputs(), plain(right=0, softcap=1.0, sinks=torch.ones(4), return_max_logit=True))
    run_backward(inputs(), plain(right=0, alibi=torch.ones(4)))
    assert len(bound) == 2
    for function in bound.values():
        for cell in function.__closure__ or ():
            assert not isinstance(cell.cell_contents, Tensor)


def test_another_gpu_may_be_used_for_a_while() -> None:
    real = current_gpu()
    assert type(real) is Gpu
    before = dict(bound)
    with pytest.raises(ZeroDivisionError), use_gpu(FakeGpu("sm_80")) as fake:
        assert current_gpu() is fake and bound == {}
        launcher.forward(*inputs(), plain())
        raise ZeroDivisionError
    assert current_gpu() is real and bound == before
