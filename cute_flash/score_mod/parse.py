"""Parses the text of a graph: the inverse of `Graph.text`.

Operators receive graphs as text, possibly from another process or from an exported program. The text is checked like
any other argument: it must be a graph that tracing could produce.
"""

from __future__ import annotations

from typing import Any

from cute_flash.score_mod.graph import (
    CAPTURE_KINDS,
    CASTS,
    FLOATING,
    INPUTS,
    INT_BITS,
    MAX_CAPTURE_RANK,
    OPERATIONS,
    TYPES,
    Builder,
    CaptureSpec,
    Graph,
    Node,
    fits,
)

UNARY = {"neg", "abs", "not", *CASTS, *FLOATING} - {"div", "pow"}


def parse_graph(value: Any) -> Graph:
    """Build a graph from the decoded JSON of `Graph.text`; raise `ValueError` for other values."""
    try:
        captures, scalars, nodes, outputs = value
        builder = Builder([_capture(*x) for x in captures], scalars)
        _require(all(kind in ("int", "float") for kind in scalars), "scalars must be int or float")
        for node in nodes:
            builder.nodes.append(_node(builder, *node))
        _require(bool(outputs) and all(map(builder.has, outputs)), "outputs must be indices of nodes")
    except (TypeError, LookupError) as error:
        raise ValueError(f"not the text of a graph: {error}") from error
    return Graph(tuple(builder.nodes), tuple(outputs), tuple(builder.captures), tuple(builder.scalars))


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(f"not the text of a graph: {rule}")


def _capture(dtype: str, rank: int) -> CaptureSpec:
    _require(dtype in CAPTURE_KINDS, f"a tensor of dtype {dtype} cannot be captured")
    _require(type(rank) is int and 0 <= rank <= MAX_CAPTURE_RANK, f"rank {rank}: use 0 to {MAX_CAPTURE_RANK}")
    return CaptureSpec(dtype, rank)


def _node(builder: Builder, op: str, kind: str, args: list[int], value: Any = None) -> Node:
    _require(all(map(builder.has, args)), "operands must come before their node")
    operands = tuple(args)
    if op == "input":
        _require(not args and kind == INPUTS[value][0], f"the input {value} cannot have kind {kind} or operands")
    elif op == "constant":
        is_valid = type(value) is TYPES[kind] and (kind not in INT_BITS or fits(value, kind))
        _require(not args and is_valid, f"the constant {value!r} is not of kind {kind}, or has operands")
    elif op == "scalar":
        exists = type(value) is int and 0 <= value < len(builder.scalars)
        _require(
            not args and exists and kind == builder.scalars[value], "a scalar node must refer to a scalar of the graph"
        )
    elif op == "load":
        _require(
            type(value) is int and 0 <= value < len(builder.captures), "a load must refer to a capture of the graph"
        )
        spec = builder.captures[value]
        _require(
            kind == spec.kind and len(args) == spec.rank,
            "a load must have the kind of its capture, and an index for each dimension",
        )
        _require(all(builder.kind(i) == "int" for i in args), "indices must be ints")
    else:
        _require(op in OPERATIONS and value is None, f"{op} is not an operation, or has a value")
        arity = 1 if op in UNARY else 3 if op == "where" else 2
        _require(len(args) == arity, f"{op} must have {arity} operand(s)")
        _require(
            builder.typed(op, operands) == (operands, kind), f"{op} cannot have operands or a result of these kinds"
        )
    return Node(op, kind, operands, value)
