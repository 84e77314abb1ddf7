"""Generates the Python source of the function that runs a plan: allocations, launches, finalizers.

A launch passes up to thirty arguments. Looking each of them up in a table would take longer than the launch, so the
source names the operands of each kernel directly. Plans that differ only in numbers share the compiled source. It is
registered with `linecache`: tracebacks and debuggers show it, and `source_of` returns it.

The function of a plain forward call on Hopper:

    def forward(q, k, v, args):
        if current_device() != device_index:
            return on_device(device_index, forward, q, k, v, args)
        out = empty_like(q)
        lse = empty_strided(lse_shape, lse_stride, dtype=lse_dtype, device=device)
        scale = args.scale
        if not MIN_SCALE <= scale < inf:
            q, scale = positive_scale(q, scale)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            q, k, v = ensure_aligned(q), ensure_aligned(k), ensure_aligned(v)
        tile_counter = 0
        fwd_sm90(q, k, v, out, lse, scale, window_left, window_right, heads_per_l2_group, …, None)
        return out, lse, None

All launches are generated here: `attn`, its gradients, `attn_decode` and merges. The rules that hold for every launch
are methods of `FunctionSource`: the current device, the sign of the scale, the window, alignment, and the value of an
operand. The function holds no counter or address, so it can run on any stream and inside a CUDA graph.
"""

from __future__ import annotations

import inspect
import linecache
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from cute_flash.jit import nvtx
from cute_flash.planning.decode import DecodePlan
from cute_flash.planning.launch import LaunchChain, LaunchKey
from cute_flash.planning.plan import Plan
from cute_flash.planning.registry import DROPOUT_ORIGIN
from cute_flash.runtime import block_masks, finalizers, operands
from cute_flash.runtime.gpu import current_gpu
from cute_flash.spec.args import GRADIENT_FIELDS
from cute_flash.spec.band import Band
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.features import Buffer, Operand
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
    "rows_of_sequences": finalizers.rows_of_sequences,
    **{
        name: getattr(operands, name)
        for name in (
            "aligned_like", "cache_operand", "cache_scale", "check_caches", "dropout_origin_operands",
            "ensure_aligned", "pack_gqa", "positive_scale", "rotary_operand", "rows_of_table",
        )
    },
}  # fmt: skip


class FunctionSource:
    """The source of one generated function, line by line, and the values of its free names."""

    def __init__(self, name: str, parameters: str, device: torch.device, **values: Any) -> None:
        self.name, self.gpu, self.device = name, current_gpu(), device
        self.lines = [f"def {name}({parameters}):"]
        self.indent = "    "
        # Values of free names. They may differ between plans with the same source.
        self.values: dict[str, Any] = {
            "current_device": self.gpu.current_device,
            "on_device": self.gpu.on_device,
            "device": device,
            "device_index": device.index,
            **values,
        }
        self.locals = {name.strip() for name in parameters.split(",")}
        self.add(f"if current_device() != device_index:\n    return on_device(device_index, {name}, {parameters})")

    @staticmethod
    def of_plan(name: str, parameters: str, plan: Plan | DecodePlan, device: torch.device) -> FunctionSource:
        tile = plan.tile
        sizes = {"tile_m": tile.tile_m, "tile_n": tile.tile_n, **plan.sizes}
        f = FunctionSource(name, parameters, device, problem=plan.problem, **sizes)
        f.window(plan.problem.band)
        return f

    def add(self, text: str) -> None:
        self.lines += [f"{self.indent}{line}" for line in text.split("\n")]

    def assign(self, name: str, expression: str) -> None:
        self.add(f"{name} = {expression}")
        self.locals |= {one.strip() for one in name.split(",")}

    def call(self, function: Callable[..., Any], renamed: Mapping[str, str] | None = None) -> str:
        """The source of a call of `function` with local variables that have the names of its parameters.

        `renamed` maps parameters to other expressions.
        """
        self.values.setdefault(function.__name__, function)
        arguments = [(renamed or {}).get(name, name) for name in inspect.signature(function).parameters]
        return f"{function.__name__}({', '.join(arguments)})"

    # ---- workspace

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

    def workspace(self, buffers: Sequence[Buffer], num_launches: int) -> None:
        """Add the workspace, and begin the block of launches that use it.

        If several launches of the call use shared memory, the block holds a lock, which keeps other threads from
        launching between them.
        """
        shared = [buffer for buffer in buffers if buffer.is_shared]
        for buffer in buffers:
            if not buffer.is_shared:
                self.allocate(buffer)
        if shared:
            self.values["shared_workspace"] = self.gpu.workspace(tuple(shared), self.device.index, num_launches)
            if num_launches > 1:
                self.values["launch_lock"] = self.gpu.launch_lock
                self.add("with launch_lock:")
                self.indent = 8 * " "
            self.assign(", ".join(buffer.name for buffer in shared), "shared_workspace()")
        lists: dict[str, list[str]] = {}
        for buffer in buffers:
            if buffer.list_name:
                lists.setdefault(buffer.list_name, []).append(buffer.name)
        for name, elements in lists.items():
            self.assign(name, f"[{', '.join(elements)}]")

    # ---- rules of every launch

    def scale(self) -> None:
        """Add the scale. q takes its sign, because kernels need a positive scale."""
        self.assign("scale", "args.scale")
        self.add("if not MIN_SCALE <= scale < inf:\n    q, scale = positive_scale(q, scale)")

    def align(self, names: tuple[str, ...], copies: bool) -> None:
        """Add the copies of misaligned inputs. Unless `copies`, strides are aligned, and only addresses are checked."""
        aligned = f"{', '.join(names)} = {', '.join(f'ensure_aligned({name})' for name in names)}"
        if copies:
            self.add(aligned)
        else:
            addresses = " | ".join(f"{name}.data_ptr()" for name in names)
            addresses = f"({addresses})" if len(names) > 1 else addresses
            self.add(f"if {addresses} % {ROW_ALIGN_BYTES}:\n    {aligned}")

    def window(self, band: Band) -> None:
        """Set the operands of the window and the chunk, which are part of the signature.

        Kernels do not read an absent bound, which is 0. A kernel with a chunk reads both bounds: an absent one is then
        a bound that masks nothing.
        """
        absent = 0 if band.chunk is None else operands.MAX_WINDOW
        for side, bound in (("left", band.left), ("right", band.right)):
            self.values[f"window_{side}"] = absent if bound is None else min(bound, operands.MAX_WINDOW)
        if band.chunk is not None:
            self.values["attention_chunk"] = min(band.chunk, operands.MAX_WINDOW)

    def launch(self, key: LaunchKey, renamed: Mapping[str, str]) -> None:
        """Add the launch of a kernel, or of several. `renamed` maps operands to expressions."""
        self.values[key.kernel] = self.gpu.chain(key) if isinstance(key, LaunchChain) else self.gpu.kernel(key)
        for mods in [getattr(one.static, "mods", None) for one in key.keys]:
            if mods is not None:
                self.values["mods"] = mods
        arguments = [self._operand(x, key, renamed) for x in key.parameters]
        self.add(f"{key.kernel}({', '.join(arguments)})")

    def _operand(self, operand: Operand, key: LaunchKey, renamed: Mapping[str, str]) -> str:
        """The expression of an operand: from `renamed`, a call of `Operand.value`, or a variable of its name.

        It is None if the kernel does not take the operand.
        """
        name = operand.name
        if not key.takes(operand):
            return "None"
        if name in renamed:
            return renamed[name]
        if operand.value is not None:
            return self.call(operand.value)
        if name not in self.locals and name not in self.values:
            raise LookupError(f"the operand {name} of {key.kernel} has no value")
        return name

    # ---- arguments of attention

    def dropout_origin(self) -> None:
        """Add the operands of dropout on a shard."""
        names = ", ".join(operand.name for operand in DROPOUT_ORIGIN)
        self.assign(names, "dropout_origin_operands(args.dropout_origin)")

    def tile_counter(self, plan: Plan) -> None:
        """Add the tile counter of a dynamic scheduler; for use before the first launch.

        Fetching a counter may enqueue a memset, which must not come between launches that overlap (programmatic
        dependent launch).
        """
        if plan.is_dynamic:
            self.values["fetch_counter"] = self.gpu.tile_counter
            self.assign("counter, tile_counter", "fetch_counter(device_index)")
        elif plan.family == "sm90":
            self.assign("tile_counter", "0")

    def block_indices(self, plan: Plan, lists: Callable[..., Any]) -> None:
        """Add the index lists of a block mask."""
        # With a semaphore, all K/V tiles visit the m_blocks in the same order.
        begins_apart = plan.tile.begins_apart and not plan.deterministic
        flags = {"deterministic": str(plan.deterministic), "begins_apart": str(begins_apart)}
        self.assign("block_indices", self.call(lists, flags))

    def offsets(self, plan: Plan) -> None:
        """Add the operands of a varlen batch: offsets, and the window bounds of the scheduler kernel."""
        band, farthest = plan.problem.band, operands.MAX_WINDOW
        self.assign("cu_seqlens_q", "args.cu_seqlens_q.contiguous()")
        self.assign("cu_seqlens_k", "args.cu_seqlens_k.contiguous()")
        if plan.problem.seqused_k:
            self.assign("seqused_k", "args.seqused_k.contiguous()")
        for side, bound in (("left", band.left), ("right", band.right)):
            self.values[f"scheduler_{side}"] = farthest if bound is None else min(bound, farthest)

    def bind(self) -> Callable[..., Any]:
        """Compile the source, or reuse equal source, and return the function."""
        if nvtx.IS_MARKED:
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
    f = FunctionSource.of_plan("forward", "q, k, v, args", plan, device)
    out_dtype = "float32" if problem.out_fp32 else problem.dtype
    f.values["out_dtype"] = getattr(torch, out_dtype)
    if problem.varlen:
        f.allocate(Buffer("out", (problem.seqlen_q, problem.heads, problem.width_v), out_dtype))
        f.allocate(Buffer("lse", (problem.heads, problem.seqlen_q)))
    else:
        is_like_q = problem.head_dim_v is None and not problem.out_fp32
        f.assign("out", "empty_like(q)" if is_like_q else "out_like(q, v, out_dtype)")
        f.allocate(Buffer("lse", (problem.batch, problem.heads, problem.seqlen_q)))
    f.scale()
    f.align(("q", "k", "v"), copies_inputs)
    renamed: dict[str, str] = {}
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
    if problem.block_sparse:
        f.block_indices(plan, block_masks.forward_block_indices)
    if problem.varlen:
        f.offsets(plan)
    if problem.dropout_origin:
        f.dropout_origin()
    f.tile_counter(plan)
    f.workspace(plan.workspace, len(plan.launches))
    for key in plan.host_calls:
        f.launch(key, renamed)
    f.indent = "    "
    if copies_output:
        f.add("out.copy_(target)")
    if problem.varlen and "sinks" in problem.features and plan.main.kernel != "fwd_split_kv":
        # The kernel treats padding as a sequence without keys, whose LSE is the sink; padding has an LSE of -inf.
        f.add("lse.masked_fill_(~rows_of_sequences(args, q), -inf)")
    f.add(f"return out, lse, {'max_logit' if 'return_max_logit' in problem.features else None}")
    return f.bind()


def bind_backward(plan: Plan, device: torch.device, copies_inputs: bool, copies_gradients: bool) -> Callable[..., Any]:
    """Bind the plan of a backward pass to a function of (dout, dlse, q, k, v, out, lse, args).

    Args:
        plan: The plan.
        device: The device of the tensors.
        copies_inputs: Whether kernels cannot read an input in place because of its strides.
        copies_gradients: Whether kernels cannot write dq, dk or dv in place because of their strides.
    """
    problem = plan.problem
    f = FunctionSource.of_plan("backward", "dout, dlse, q, k, v, out, lse, args", plan, device)
    for name in ("q", "k", "v"):
        f.assign(f"d{name}", f"empty_like({name})")
    f.scale()
    # As in the forward, q takes the sign of the scale; `dq_scale` has the sign for dq.
    f.assign("dq_scale", "-scale if args.scale < 0 else scale")
    f.align(("q", "k", "v", "out", "dout"), copies_inputs)
    f.assign("lse", "lse.contiguous()")
    has_dlse = plan.launch("bwd_preprocess").static.has_dlse
    if has_dlse:
        f.assign("dlse", "dlse.contiguous()")
    f.assign("dout_cast", "dout.to(q.dtype, memory_format=contiguous_format)" if problem.out_fp32 else "dout")
    renamed = {"dbias_terms": "dbias"}
    if copies_gradients:
        for name in ("dq", "dk", "dv"):
            f.assign(f"{name}_target", f"aligned_like({name})")
            renamed[name] = f"{name}_target"
    if problem.block_sparse:
        f.block_indices(plan, block_masks.backward_block_indices)
    if "dropout" in plan.main.static.features and "dropout" not in problem.features:
        # The kernel is compiled with dropout, at probability 0; see `tiles.pads_with_dropout`.
        f.add("args = args._replace(rng=zeros(2, dtype=int64, device=device))")
    if problem.varlen:
        f.offsets(plan)
    if problem.dropout_origin:
        f.dropout_origin()
    f.tile_counter(plan)
    f.workspace(plan.workspace, len(plan.launches))
    for key in plan.host_calls:
        f.launch(key, renamed)
    if not plan.finalizers:
        f.indent = "    "
    if copies_gradients:
        for name in ("dq", "dk", "dv"):
            f.add(f"if {name}_target is not {name}:\n    {name}.copy_({name}_target)")
    f.add(f"return dq, dk, dv, ({_gradients(f, plan, has_dlse)})")
    return f.bind()


def _gradients(f: FunctionSource, plan: Plan, has_dlse: bool) -> str:
    """The source of the gradients of `AttentionArgs.differentiable`: a call of a finalizer for each that is needed."""
    names = {buffer.name for buffer in plan.workspace}
    renamed = {} if has_dlse else {"dlse": "None"}
    renamed |= {"dbias": "dbias_sum"} if "dbias_sum" in names else {}
    renamed |= {} if "dcapture_terms" in f.locals else {"dcapture_terms": "None"}
    finish = {gradient.field: getattr(finalizers, gradient.finish) for gradient in plan.finalizers}
    parts = [f.call(finish[field], renamed) if field in finish else "None" for field in GRADIENT_FIELDS[:-1]]
    captures = GRADIENT_FIELDS[-1]
    if captures in finish:
        parts.append(f"*{f.call(finish[captures], renamed)}")
    elif plan.problem.mods is not None:
        parts.append("*(None,) * len(args.captures)")
    return ", ".join(parts)


def bind_decode(
    plan: DecodePlan,
    device: torch.device,
    values: Mapping[str, str],
    *,
    copies_q: bool,
    is_like_q: bool,
    writes_to_args: bool,
    scratch_lse: torch.Tensor | None,
) -> Callable[..., Any]:
    """Bind the plan of `attn_decode` to a function of (q, k_cache, v_cache, args).

    Args:
        plan: The plan.
        device: The device of the tensors.
        values: The expressions of the operands that come from k_cache, v_cache and `args`.
        copies_q: Whether the kernel cannot read q in place because of its strides.
        is_like_q: Whether the output has the shape and the strides of q.
        writes_to_args: Whether the output is written to `args.out`.
        scratch_lse: Receives the LSE if the caller does not read it.
    """
    problem = plan.problem
    f = FunctionSource.of_plan("run_decode", "q, k_cache, v_cache, args", plan, device)
    # Strides were checked when the function was bound; addresses may differ from call to call.
    if problem.is_latent:
        f.add(f"if k_cache.data_ptr() % {ROW_ALIGN_BYTES}:\n    check_caches(k_cache, v_cache, args)")
    else:
        f.assign("k_address, v_address", "k_cache.data_ptr(), v_cache.data_ptr()")
        is_same = " or k_address == v_address" if problem.has_new else ""
        f.add(f"if (k_address | v_address) % {ROW_ALIGN_BYTES}{is_same}:\n    check_caches(k_cache, v_cache, args)")
    f.scale()
    f.align(("q",), copies_q)
    renamed = dict(values)
    if writes_to_args:
        f.assign("out", "args.out")
        f.assign("target", "aligned_like(out)")
        renamed["out"] = "target"
    elif is_like_q:
        f.assign("out", "empty_like(q)")  # in half the time of other allocations
    else:
        f.allocate(Buffer("out", problem.out_shape, problem.dtype))
    if scratch_lse is None:
        f.allocate(Buffer("lse", problem.lse_shape))
    else:
        f.values["lse"] = scratch_lse
    if problem.is_ragged:
        renamed |= {name: f"{renamed.get(name, name)}[None]" for name in ("q", "out", "lse", "k_new", "v_new")}
    f.workspace(plan.workspace, len(plan.launches))
    for key in plan.launches:
        f.launch(key, renamed)
    if writes_to_args:
        f.add("if target is not out:\n    out.copy_(target)")
    f.add("return out, lse")
    return f.bind()


def bind_merge(key: LaunchKey, device: torch.device) -> Callable[..., Any]:
    """Bind a merge to a function of (out, lse, partials, partial_lses, first_rows)."""
    f = FunctionSource("merge", "out, lse, partials, partial_lses, first_rows", device)
    renamed = {
        "partials": "[ensure_aligned(x) for x in partials]",
        "partial_lses": "[x.contiguous() for x in partial_lses]",
    }
    f.launch(key, renamed)
    return f.bind()
