"""Generates the Python source of the function that runs a plan: allocations, launches, finalizers.

A launch passes up to thirty arguments. Looking each of them up in a table would take longer than the launch, so the
source names the operands of each kernel directly. Plans that differ only in numbers share the compiled source. It is
registered with `linecache`: tracebacks and debuggers show it, and `source_of` returns it.

The function of a plain forward call on Hopper:

    def forward(q, k, v, args):
        if current_device() != device_index:
            return on_device(device_index, forward, q, k, v, args)
        scale = args.scale
        out = empty_like(q)
        lse = empty_strided(lse_shape, lse_stride, dtype=lse_dtype, device=device)
        if not MIN_SCALE <= scale < inf:
            q, scale = positive_scale(q, scale)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            q, k, v = ensure_aligned(q), ensure_aligned(k), ensure_aligned(v)
        tile_counter = 0
        fwd_sm90(q, k, v, out, lse, scale, 0, 0, heads_per_l2_group, num_ctas, seqlen_q, tile_counter, None, …)
        return out, lse, None

The function holds no tensor, counter or address, so it can run on any stream and inside a CUDA graph.
"""

from __future__ import annotations

import inspect
import linecache
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from cute_flash.jit import nvtx
from cute_flash.planning.plan import Buffer, CompileKey, Plan
from cute_flash.planning.registry import DROPOUT_ORIGIN, KERNELS
from cute_flash.runtime import finalizers, operands
from cute_flash.runtime.gpu import current_gpu
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.features import FEATURE, Operand
from cute_flash.spec.shapes import out_like

# The globals of generated functions.
_HELPERS: dict[str, Any] = {
    "empty_like": torch.empty_like,
    "empty_strided": torch.empty_strided,
    "zeros": torch.zeros,
    "full": torch.full,
    "contiguous_format": torch.contiguous_format,
    "int64": torch.int64,
    "out_like": out_like,
    "inf": math.inf,
    "MIN_SCALE": operands.MIN_SCALE,
    "MAX_WINDOW": operands.MAX_WINDOW,
    **{
        name: getattr(operands, name)
        for name in (
            "aligned_like", "capture_operands", "clamp_window", "dropout_origin_operands", "ensure_aligned", "pack_gqa",
            "positive_scale", "scalar_operands",
        )
    },
    **{
        name: getattr(finalizers, name)
        for name in (
            "alibi_gradient", "bias_gradient", "captures_gradient", "rows_of_sequences", "sinks_gradient",
        )
    },
}  # fmt: skip


class FunctionSource:
    """The source of one generated function, line by line, and the values of its free names."""

    def __init__(self, name: str, parameters: str, plan: Plan, device: torch.device) -> None:
        self.name, self.plan, self.gpu = name, plan, current_gpu()
        self.lines = [f"def {name}({parameters}):"]
        # Values of free names. They may differ between plans with the same source.
        self.values: dict[str, Any] = {
            "current_device": self.gpu.current_device,
            "on_device": self.gpu.on_device,
            "device": device,
            "device_index": device.index,
            "problem": plan.problem,
            "tile_m": plan.tile.tile_m,
            "tile_n": plan.tile.tile_n,
            **plan.sizes,
        }
        self.locals = {name.strip() for name in parameters.split(",")}
        self.add(f"if current_device() != device_index:\n    return on_device(device_index, {name}, {parameters})")

    def add(self, text: str) -> None:
        self.lines += [f"    {line}" for line in text.split("\n")]

    def assign(self, name: str, expression: str) -> None:
        self.add(f"{name} = {expression}")
        self.locals.add(name)

    def allocate(self, buffer: Buffer) -> None:
        name, dtype, shape = buffer.name, f"{buffer.name}_dtype", buffer.shape
        self.values[dtype] = getattr(torch, buffer.dtype)
        if buffer.init == "empty":
            self.values |= {f"{name}_shape": shape, f"{name}_stride": compact_strides(shape)}
            call = f"empty_strided({name}_shape, {name}_stride"
        else:
            self.values[f"{name}_shape"] = shape
            call = f"zeros({name}_shape" if buffer.init == "zeros" else f"full({name}_shape, {buffer.init}"
        self.assign(name, f"{call}, dtype={dtype}, device=device)")

    def call(self, function: Callable[..., Any], **renamed: str) -> str:
        """The source of a call of `function` with local variables that have the names of its parameters.

        `renamed` maps parameters to other expressions.
        """
        names = inspect.signature(function).parameters
        self.values.setdefault(function.__name__, function)
        return f"{function.__name__}({', '.join(renamed.get(name, name) for name in names)})"

    def launch(self, key: CompileKey, **renamed: str) -> None:
        """Add the launch of a kernel. `renamed` maps operands to expressions."""
        self.values[key.kernel] = self.gpu.kernel(key)
        direction = "fwd" if key.kernel.startswith("fwd") else "bwd"
        feature_operands = {
            operand.name: operand for name in key.static.features for operand in getattr(FEATURE[name], direction)
        }
        arguments = [self._operand(x, key, feature_operands, renamed) for x in KERNELS[key.kernel].operands]
        self.add(f"{key.kernel}({', '.join(arguments)})")

    def _operand(
        self, operand: Operand, key: CompileKey, feature_operands: dict[str, Operand], renamed: dict[str, str]
    ) -> str:
        """The expression of an operand: from `renamed`, a call of `Operand.value`, a variable of its name, or None."""
        name = operand.name
        if name in renamed:
            return renamed[name]
        if operand.value is not None:
            return self.call(operand.value) if name in feature_operands else "None"
        return name if name in self.locals or name in self.values else "None"

    def window(self) -> dict[str, str]:
        """The expressions of the window operands. Kernels do not read an absent bound, which is passed as 0."""
        band = self.plan.problem.band
        return {
            f"window_{side}": "0" if bound is None else f"clamp_window(args.window_{side})"
            for side, bound in (("left", band.left), ("right", band.right))
        }

    def dropout_origin(self) -> None:
        """Add the operands of dropout on a shard."""
        if self.plan.problem.dropout_origin:
            names = [operand.name for operand in DROPOUT_ORIGIN]
            self.add(f"{', '.join(names)} = dropout_origin_operands(args.dropout_origin)")
            self.locals |= set(names)

    def tile_counter(self) -> None:
        """Add the tile counter of a dynamic scheduler; for use before the first launch.

        Fetching a counter may enqueue a memset, which must not come between launches that overlap (programmatic
        dependent launch).
        """
        if self.plan.is_dynamic:
            self.values["fetch_counter"] = self.gpu.tile_counter
            self.add("counter, tile_counter = fetch_counter(device_index)")
            self.locals |= {"counter", "tile_counter"}
        elif self.plan.family == "sm90":
            self.assign("tile_counter", "0")

    def mods(self, backward: bool) -> None:
        """Add the operands of user mods and block masks."""
        spec = self.plan.problem.mods
        if spec is None:
            return
        graphs = [spec.graphs.score, spec.graphs.mask, *([spec.graphs.bwd] if backward else [])]
        num_captures = sum(len(graph.captures) for graph in graphs if graph is not None)
        kinds = tuple(kind for graph in graphs if graph is not None for kind in graph.scalars)
        if num_captures:
            self.assign("captures", f"capture_operands(args.captures[:{num_captures}])")
        if kinds:
            self.values["scalar_kinds"] = kinds
            self.assign("scalars", "scalar_operands(scalar_kinds, args.scalars)")
        if self.plan.problem.block_sparse:
            from cute_flash.runtime.block_masks import backward_block_indices, forward_block_indices

            lists = backward_block_indices if backward else forward_block_indices
            # With a semaphore, all K/V tiles visit the m_blocks in the same order.
            begins_apart = self.plan.tile.begins_apart and not self.plan.deterministic
            flags = {"deterministic": str(self.plan.deterministic), "begins_apart": str(begins_apart)}
            self.assign("block_indices", self.call(lists, **flags))

    def offsets(self) -> None:
        """Add the operands of the varlen scheduler: offsets and window bounds."""
        band = self.plan.problem.band
        self.assign("cu_seqlens_q", "args.cu_seqlens_q.contiguous()")
        self.assign("cu_seqlens_k", "args.cu_seqlens_k.contiguous()")
        if self.plan.problem.seqused_k:
            self.assign("seqused_k", "args.seqused_k.contiguous()")
        for side, bound in (("left", band.left), ("right", band.right)):
            text = "MAX_WINDOW" if bound is None else f"clamp_window(args.window_{side})"
            self.assign(f"scheduler_{side}", text)

    def bind(self) -> Callable[..., Any]:
        """Compile the source, or reuse equal source, and return the function."""
        if nvtx.MARKS_LAUNCHES:
            self.values["marked"] = nvtx.marked
            first, *body = self.lines
            self.lines = [first, '    with marked("launch"):', *(f"    {line}" for line in body)]
        return _factory("\n".join(self.lines), self.name, tuple(self.values))(*self.values.values())


_source_numbers = count()


@lru_cache(maxsize=1024)
def _factory(source: str, name: str, values: tuple[str, ...]) -> Callable[..., Callable[..., Any]]:
    """Compile a function that takes the values of the free names and returns the generated function."""
    indented = "\n".join(f"    {line}" for line in source.split("\n"))
    text = f"def bind({', '.join(values)}):\n{indented}\n    return {name}\n"
    filename = f"<cute_flash {name} {next(_source_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace = dict(_HELPERS)
    exec(compile(text, filename, "exec"), namespace)
    return namespace["bind"]


def source_of(launch: Callable[..., Any]) -> str:
    """The source of a bound function."""
    return "".join(linecache.getlines(launch.__code__.co_filename))


def compact_strides(shape: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(shape)
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def bind_forward(plan: Plan, device: torch.device, copies_inputs: bool, copies_output: bool) -> Callable[..., Any]:
    """Bind the plan of a forward pass to a function of (q, k, v, args).

    Args:
        plan: The plan.
        device: The device of the tensors.
        copies_inputs: Whether kernels cannot read q, k or v in place because of their strides.
        copies_output: Whether kernels cannot write out in place because of its strides.
    """
    problem = plan.problem
    f = FunctionSource("forward", "q, k, v, args", plan, device)
    f.assign("scale", "args.scale")
    out_dtype = "float32" if problem.out_fp32 else problem.dtype
    f.values["out_dtype"] = getattr(torch, out_dtype)
    if problem.varlen:
        f.allocate(Buffer("out", (problem.seqlen_q, problem.heads, problem.width_v), out_dtype))
        f.allocate(Buffer("lse", (problem.heads, problem.seqlen_q)))
    else:
        is_like_q = problem.head_dim_v is None and not problem.out_fp32
        f.assign("out", "empty_like(q)" if is_like_q else "out_like(q, v, out_dtype)")
        f.allocate(Buffer("lse", (problem.batch, problem.heads, problem.seqlen_q)))
    f.add("if not MIN_SCALE <= scale < inf:\n    q, scale = positive_scale(q, scale)")
    _align(f, ("q", "k", "v"), copies_inputs)
    for buffer in plan.workspace:
        f.allocate(buffer)
    f.mods(backward=False)
    renamed = f.window()
    if copies_output:
        f.assign("target", "empty_like(out, memory_format=contiguous_format)")
        renamed["out"] = "target"
    if plan.pack_gqa:
        f.values |= {
            "group": problem.group,
            "lse_packed": (problem.batch, problem.heads_kv, problem.group * problem.seqlen_q),
        }
        renamed |= {
            "q": "pack_gqa(q, group)",
            "out": f"pack_gqa({renamed.get('out', 'out')}, group)",
            "lse": "lse.view(lse_packed)",
        }
    if problem.varlen:
        f.offsets()
    f.dropout_origin()
    f.tile_counter()
    for key in plan.launches:
        f.launch(key, **renamed)
    if copies_output:
        f.add("out.copy_(target)")
    if problem.varlen and "sinks" in problem.features:
        # The kernel treats padding as a sequence without keys, whose LSE is the sink; padding has an LSE of -inf.
        f.add("lse.masked_fill_(~rows_of_sequences(args, q), -inf)")
    f.add(f"return out, lse, {'max_logit' if 'return_max_logit' in problem.features else None}")
    return f.bind()


def bind_backward(
    plan: Plan, device: torch.device, copies_inputs: bool, copies_gradients: bool, captures: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Bind the plan of a backward pass to a function of (dout, dlse, q, k, v, out, lse, args).

    Args:
        plan: The plan.
        device: The device of the tensors.
        copies_inputs: Whether kernels cannot read an input in place because of its strides.
        copies_gradients: Whether kernels cannot write dq, dk or dv in place because of their strides.
        captures: Indices of the captured tensors that need a gradient.
    """
    problem = plan.problem
    f = FunctionSource("backward", "dout, dlse, q, k, v, out, lse, args", plan, device)
    f.assign("dq", "empty_like(q)")
    f.assign("dk", "empty_like(k)")
    f.assign("dv", "empty_like(v)")
    f.assign("scale", "args.scale")
    f.assign("dq_scale", "scale")
    # As in the forward, q takes the sign of the scale, so that the scale is positive; `dq_scale` has the sign for dq.
    f.add(
        "if not MIN_SCALE <= scale < inf:\n"
        "    q, scale = positive_scale(q, scale)\n"
        "    dq_scale = -scale if dq_scale < 0 else scale"
    )
    _align(f, ("q", "k", "v", "out", "dout"), copies_inputs)
    f.assign("lse", "lse.contiguous()")
    if plan.launch("bwd_preprocess").static.has_dlse:
        f.assign("dlse", "dlse.contiguous()")
    else:
        f.locals.discard("dlse")
    f.assign("dout_cast", "dout.to(q.dtype, memory_format=contiguous_format)" if problem.out_fp32 else "dout")
    for buffer in plan.workspace:
        f.allocate(buffer)
    renamed = f.window()
    if copies_gradients:
        for name in ("dq", "dk", "dv"):
            f.assign(f"{name}_target", f"aligned_like({name})")
            renamed[name] = f"{name}_target"
    f.mods(backward=True)
    if any(buffer.name == "dbias" for buffer in plan.workspace):
        renamed |= {"dbias": "dbias.expand(problem.batch, problem.heads, -1, -1)", "dbias_terms": "dbias"}
    if captures:
        f.assign("dcaptures", f"[{', '.join(f'dcapture_{i}' for i in captures)}]")
        if plan.deterministic:
            f.assign("dcapture_terms", "[terms, elements]")
    if "dropout" in plan.main.static.features and "dropout" not in problem.features:
        # The kernel is compiled with dropout, at probability 0; see `tiles.pads_with_dropout`.
        f.add("args = args._replace(rng=zeros(2, dtype=int64, device=device))")
    if problem.varlen:
        f.offsets()
    f.dropout_origin()
    f.tile_counter()
    for key in plan.launches:
        f.launch(key, **renamed)
    if copies_gradients:
        for name in ("dq", "dk", "dv"):
            f.add(f"if {name}_target is not {name}:\n    {name}.copy_({name}_target)")
    f.add(f"return dq, dk, dv, ({_gradients(f, captures)})")
    return f.bind()


def _gradients(f: FunctionSource, captures: tuple[int, ...]) -> str:
    """The source of the gradients of `AttentionArgs.differentiable`."""
    features, names = f.plan.problem.features, {buffer.name for buffer in f.plan.workspace}
    if not f.plan.finalizers and "dbias" not in names and not captures:
        return "None, None, None, *(None,) * len(args.captures)" if f.plan.problem.mods else "None, None, None"
    dlse = "dlse" if "dlse" in f.locals else "None"
    f.values["capture_indices"] = captures
    if captures and f.plan.deterministic:
        f.add(f.call(finalizers.sum_capture_terms))
    summed = {"dbias": "dbias_sum"} if "dbias_sum" in names else {}
    capture_grads = "*captures_gradient(args, capture_indices, dcaptures)" if captures else ""
    return ", ".join(
        (
            f.call(finalizers.alibi_gradient) if "alibi" in features else "None",
            f.call(finalizers.sinks_gradient, dlse=dlse) if "sinks" in features else "None",
            f.call(finalizers.bias_gradient, **summed) if "dbias" in names else "None",
            capture_grads or "*(None,) * len(args.captures)",
        )
    )


def _align(f: FunctionSource, names: tuple[str, ...], copies: bool) -> None:
    """Add the copies of misaligned inputs. Unless `copies`, all strides are aligned, and only addresses are checked."""
    aligned = f"{', '.join(names)} = {', '.join(f'ensure_aligned({name})' for name in names)}"
    if copies:
        f.add(aligned)
    else:
        addresses = " | ".join(f"{name}.data_ptr()" for name in names)
        f.add(f"if ({addresses}) % {ROW_ALIGN_BYTES}:\n    {aligned}")
