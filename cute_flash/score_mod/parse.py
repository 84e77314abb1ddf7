"""Parses the text of a graph: the inverse of `Graph.text`.

Operators receive graphs as text, possibly from another process or from a saved program, so that a text is
checked like any other argument: names, kinds, numbers of operands and indices must be those of a graph that
tracing could have made.
"""

from __future__ import annotations

from typing import Any

from cute_flash.score_mod.graph import (
    CASTS,
    FLOATING,
    INPUTS,
    MAX_TABLE_RANK,
    MEANING,
    TABLE_KINDS,
    Builder,
    Graph,
    Node,
    Table,
)

TYPES = {"bool": bool, "int": int, "float": float}
UNARY = {"neg", "abs", "not", *CASTS, *FLOATING} - {"div"}


def parse_graph(value: Any) -> Graph:
    """The graph that `Graph.text` describes, from its decoded JSON; `ValueError` if it is not a graph."""
    try:
        tables, numbers, nodes, outputs = value
        builder = Builder([_table(*x) for x in tables], numbers)
        _require(all(kind in ("int", "float") for kind in numbers), "numbers are int or float")
        for node in nodes:
            builder.nodes.append(_node(builder, *node))
        _require(bool(outputs) and all(map(builder.has, outputs)), "outputs are nodes")
    except (TypeError, LookupError) as error:
        raise ValueError(f"not the text of a graph: {error}") from error
    return Graph(tuple(builder.nodes), tuple(outputs), tuple(builder.tables), tuple(builder.numbers))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"not the text of a graph: expected that {what}")


def _table(dtype: str, rank: int) -> Table:
    _require(dtype in TABLE_KINDS, "a table has one of the dtypes of tables")
    _require(type(rank) is int and 0 <= rank <= MAX_TABLE_RANK, "a table has a rank of 0 to 4")
    return Table(dtype, rank)


def _node(builder: Builder, op: str, kind: str, args: list[int], value: Any = None) -> Node:
    _require(all(map(builder.has, args)), "operands come before their node")
    operands = tuple(args)
    if op == "input":
        _require(not args and kind == INPUTS[value][0], f"the input {value} has its kind")
    elif op == "constant":
        _require(not args and type(value) is TYPES[kind], f"a constant of kind {kind} is one")
    elif op == "number":
        known = type(value) is int and 0 <= value < len(builder.numbers)
        _require(not args and known and kind == builder.numbers[value], "a number is one of the graph's")
    elif op == "load":
        _require(type(value) is int and 0 <= value < len(builder.tables), "a load is of one of the tables")
        table = builder.tables[value]
        _require(kind == table.kind and len(args) == table.rank, "a load has an index for each dimension")
        _require(all(builder.kind(i) == "int" for i in args), "indices are ints")
    else:
        _require(op in MEANING and value is None, f"{op} is an operation")
        arity = 1 if op in UNARY else 3 if op == "where" else 2
        _require(len(args) == arity, f"{op} has {arity} operands")
        _require(builder.typed(op, operands) == (operands, kind), f"{op} has operands of its kinds")
    return Node(op, kind, operands, value)
