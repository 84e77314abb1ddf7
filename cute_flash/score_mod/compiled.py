"""Traces mods inside `torch.compile`, without a graph break.

Dynamo traces this module, and with it the mod. The mod is called with placeholders: tensors on the meta device. The
torch function mode `Recorder` sees each function, method and operator that is applied to them, and records it as a
step: a tuple of constants that refers to values by name, such as "%3". `_replay` repeats the steps on the proxies of an
ordinary trace, so that the same functions are supported and give the same graph. Dynamo does not trace `_replay`; it
calls it and treats the result as a constant.

Dynamo reads and guards the values that a mod captures. Captured tensors become arguments of the operator. A captured
number is compiled in. When it changes, Dynamo compiles again and makes it a variable; it then becomes a captured
tensor without dimensions.

Only compiled calls import this module, because importing torch._dynamo takes seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import skip_code
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.overrides import TorchFunctionMode

from cute_flash.errors import TraceError
from cute_flash.score_mod import bound
from cute_flash.score_mod.captures import capture
from cute_flash.score_mod.graph import Builder, drop_unused_arguments
from cute_flash.score_mod.overrides import inputs
from cute_flash.score_mod.proxy import METHODS, NOT_SUPPORTED, TORCH, ScalarProxy, Specialise, TensorProxy, without_line
from cute_flash.score_mod.trace import ROLES, BoundMod, check_callable, output_node

Step = tuple  # (function or its name, arguments, keyword arguments as pairs), or ("capture", dtype, rank)
META = torch.device("meta")
# Functions that describe a tensor. They are not recorded: placeholders give the right results.
DESCRIPTIONS = ("dim", "size", "numel", "is_floating_point", "element_size", "stride", "is_complex", "get_device")
POWERS = ("pow", "pow_", "__pow__", "__rpow__")
NOT_RECORDED = "torch.compile does not show how a value is computed: use tensor methods and torch functions"


class Recorder(TorchFunctionMode):
    """Records the operations that a mod applies to its arguments."""

    def __init__(self, role: str, device: torch.device) -> None:
        super().__init__()
        self.role, self.device = role, device
        self.float_dtype = torch.float64 if device.type == "cpu" else torch.float32  # of captured numbers
        self.steps: list[Step] = []
        self.captures: list[Tensor] = []
        dtypes = [torch.float32 if name in ("score", "grad") else torch.int32 for name in ROLES[role]]
        self.inputs = [torch.empty((), dtype=dtype, device=META) for dtype in dtypes]
        # The names of placeholders and captured tensors. They are numbered: the inputs, then the result of each step.
        self.names: dict[Tensor, str] = {x: f"%{i}" for i, x in enumerate(self.inputs)}

    def result(self, x: Tensor) -> Tensor:
        """Name the result of the last step."""
        self.names[x] = f"%{len(self.inputs) + len(self.steps) - 1}"
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any([_is_placeholder(x) for x in (*args, *kwargs.values())]):
            # No placeholder is involved. A meta device was read from a placeholder and stands for the real device.
            if "device" in kwargs and kwargs["device"] == META:
                kwargs = {**kwargs, "device": self.device}
            return func(*args, **kwargs)
        name = _name_of(func)
        if name in DESCRIPTIONS:
            return func(*args, **kwargs)
        if name in POWERS:
            # `operator.index` makes symbolic ints static.
            args = tuple([operator.index(x) if isinstance(x, int) else x for x in args])
        operands = tuple([self.operand(x) for x in args])
        self.steps.append((func, operands, tuple([(key, self.operand(x)) for key, x in kwargs.items()])))
        dtype = _checked(_dtype_of_last(self.role, tuple(self.steps)))
        shape: Any = ()
        if name == "__getitem__":
            shape = args[0].shape[len(args[1]) if isinstance(args[1], tuple) else 1 :]
        return self.result(torch.empty(shape, dtype=dtype, device=META))

    def operand(self, x: Any) -> Any:
        """A constant for an argument: the name of a value, or the argument itself."""
        if isinstance(x, (tuple, list)):
            return tuple([self.operand(item) for item in x])
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            if has_static_value(x):
                return operator.index(x) if isinstance(x, int) else x
            # Added to a tensor, which keeps the number symbolic; torch.full would make it static. Dynamo guards the
            # comparisons.
            dtype = self.float_dtype
            if isinstance(x, int):
                dtype = torch.int32 if -(1 << 31) <= x < 1 << 31 else torch.int64
            return self.capture(torch.zeros((), dtype=dtype, device=self.device) + x)
        if not isinstance(x, Tensor):
            return x
        if x.device == META and x not in self.names:
            self.add_hidden(x)
        return self.names[x] if x in self.names else self.capture(x)

    def capture(self, x: Tensor) -> str:
        self.steps.append(("capture", x.dtype, x.dim()))
        # A number that the mod creates, such as torch.tensor(2.0), may be on another device.
        self.captures.append(x.to(self.device) if x.dim() == 0 else x)
        return self.names[self.result(x)]

    def add_hidden(self, x: Tensor) -> None:
        """Add the steps of a value that the mode did not see: since torch 2.13, Dynamo hides `abs` from it."""
        known = list(self.names)  # noqa: F841  `_find_hidden` reads it
        comptime(_find_hidden)
        num_values = len(self.inputs) + len(self.steps)
        self.steps.extend(_checked(_hidden_steps(tuple(self.names.values()), num_values)))
        self.result(x)


def _is_placeholder(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return any([_is_placeholder(item) for item in x])
    return isinstance(x, Tensor) and x.device == META


def mod_arguments(
    score_mod: Callable | None, mask_mod: Callable | None, score_mod_bwd: Callable | None, device: torch.device
) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
    """`bound.mod_arguments` of a compiled call."""
    if not torch.compiler.is_dynamo_compiling():
        return _ordinary_mod_arguments(score_mod, mask_mod, score_mod_bwd, device)
    if score_mod is None and mask_mod is None and score_mod_bwd is None:
        return "", (), ()
    bound.check_mods(score_mod, score_mod_bwd)
    mods = (score_mod, "score_mod"), (mask_mod, "mask_mod"), (score_mod_bwd, "score_mod_bwd")
    texts: list[str] = []
    captures: list[Tensor] = []
    scalars: tuple[float, ...] = ()
    tensors: Sequence[Tensor]
    for mod, role in mods:
        if isinstance(mod, BoundMod):  # the mask_mod of a block mask
            text, tensors, scalars = mod.graph.text, mod.captures, mod.scalars
        else:
            text, tensors = ("null", ()) if mod is None else _bind(mod, role, device)
        texts.append(text)
        captures.extend(tensors)
    return f"[{','.join(texts)}]", tuple(captures), scalars


# If Dynamo cannot trace a mod, it breaks the graph and calls `mod_arguments` untraced, which traces the mod as usual.
_ordinary_mod_arguments = torch.compiler.disable(bound.mod_arguments)
skip_code(mod_arguments.__code__)


def _bind(mod: Callable, role: str, device: torch.device) -> tuple[str, list[Tensor]]:
    """The text of a mod's graph, and the tensors that it captures."""
    check_callable(mod, role)
    recorder = Recorder(role, device)
    with recorder:
        result = mod(*recorder.inputs)
    output = recorder.operand(result)
    text, used = _checked(_graph(role, tuple(recorder.steps), output))
    return text, [recorder.captures[i] for i in used]


def _checked(result: Any) -> Any:
    """Return a result of the functions below, or raise a `TraceError` if it is an error message.

    An error raised inside those functions would abort the compilation. Raised here, it can break the graph instead.
    """
    if isinstance(result, str):
        raise TraceError(result)
    return result


# ---- functions that Dynamo calls without tracing them
# ----------------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def _name_of(func: Any) -> str:
    return func.__name__


@torch.compiler.assume_constant_result
def _dtype_of_last(role: str, steps: tuple[Step, ...]) -> Any:
    """The dtype of the last step's result, or an error message."""
    try:
        return _replay(role, steps)[1][-1].dtype
    except (TraceError, Specialise, TypeError) as error:
        return _message(role, error)


@torch.compiler.assume_constant_result
def _graph(role: str, steps: tuple[Step, ...], result: Any) -> Any:
    """(text of the graph, indices of the captures that it uses), or an error message."""
    try:
        builder, values = _replay(role, steps)
        graph = builder.graph(output_node(builder, _decoded(result, values), role))
    except (TraceError, Specialise) as error:
        return _message(role, error)
    graph, captures, _ = drop_unused_arguments(graph)
    return graph.text, captures


_hidden: list[Any] = []  # passes nodes from `_find_hidden` to `_hidden_steps`


def _find_hidden(context: Any) -> None:
    """Store the nodes in Dynamo's graph of `x` and `known`, which are local variables of the caller."""
    _hidden[:] = context.get_local("x").as_proxy().node, [y.node for y in context.get_local("known").as_proxy()]


@torch.compiler.assume_constant_result
def _hidden_steps(names: tuple[str, ...], num_values: int) -> Any:
    """The steps that compute the node of `x` from those of `known`, or an error message."""
    node, known = _hidden
    names_of, steps = dict(zip(known, names)), []

    def name(x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        if x not in names_of:
            if not x.all_input_nodes:
                raise TraceError(NOT_RECORDED)
            operands, kwargs = tuple(map(name, x.args)), tuple((key, name(y)) for key, y in x.kwargs.items())
            steps.append((x.target if isinstance(x.target, str) else x.target.__name__, operands, kwargs))
            names_of[x] = f"%{num_values + len(steps) - 1}"
        return names_of[x]

    try:
        name(node)
    except TraceError as error:
        return str(error)
    return tuple(steps)


def _message(role: str, error: BaseException) -> str:
    # Without the line: the mod is not running, so it would be the line of the call. Dynamo shows the line of the mod.
    return f"{role}: {without_line(error)}"


def _replay(role: str, steps: tuple[Step, ...]) -> tuple[Builder, list[Any]]:
    """Repeat the steps on proxies; return their builder and all values."""
    builder = Builder()
    values: list[Any] = [*inputs(builder, ROLES[role])]
    for step in steps:
        if step[0] == "capture":
            _, dtype, rank = step
            values.append(capture(builder, dtype, rank, _no_sizes))
            continue
        func, args, kwargs = step
        args = _decoded(args, values)
        if func is Tensor.__getitem__ and isinstance(args[0], TensorProxy):
            values.append(args[0][args[1]])
            continue
        handler = TORCH.get(func) or _handler(func if isinstance(func, str) else func.__name__)
        values.append(handler(*args, **{key: _decoded(x, values) for key, x in kwargs}))
    return builder, values


def _no_sizes() -> tuple:
    """The sizes of a captured tensor. Dynamo reads sizes itself, so only the length of an unrolled row gets here."""
    raise TraceError(
        "a row of a captured tensor is not supported in torch.compile(fullgraph=True): index it with constants"
    )


def _handler(name: str) -> Callable:
    """The handler of a method or operator of tensors, by name."""
    # Methods that write into their tensor end with _: Dynamo calls them for `score += x`.
    handler = METHODS.get(name.removesuffix("_")) or getattr(ScalarProxy, f"__{name.strip('_')}__", None)
    if handler is None:
        raise TraceError(NOT_SUPPORTED.format(name))
    return handler


def _decoded(x: Any, values: list[Any]) -> Any:
    if isinstance(x, tuple):
        return tuple(_decoded(item, values) for item in x)
    return values[int(x[1:])] if isinstance(x, str) and x.startswith("%") else x
