"""Numbers that a mod computes from captured numbers alone, such as the difference of two times in seconds.

Kernels have floats and ints of 32 bits, and Python has floats of 64 bits and ints of any size. So an operation on
captured numbers and constants is no node of the graph: its result is another scalar, which each call computes on the
host in Python's arithmetic. A result that needs more than 32 bits is compiled in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cute_flash.score_mod.graph import OPERATIONS, TYPES, Builder, fits
from cute_flash.score_mod.proxy import Specialise


class Computed(NamedTuple):
    """A number that is computed from others: the result of an operation, as an object of a type."""

    operation: Callable[..., Any]
    operands: tuple[int, ...]  # indices of numbers
    result: type  # bool, int or float


def extend(numbers: list[Any], computed: Sequence[Computed]) -> bool:
    """Compute numbers from the captured ones in the list `numbers`, and append them to it.

    Returns false if a result is undefined, as after a division by 0, or an int beyond 32 bits.
    """
    number = numbers.__getitem__
    try:
        for operation, operands, result in computed:
            value = result(operation(*map(number, operands)))
            if result is int and not -(1 << 31) <= value < 1 << 31:
                return False
            numbers.append(value)
    except (ArithmeticError, ValueError):
        return False
    return True


class Operation(NamedTuple):
    """An operation of a mod on scalars and constants."""

    name: str
    nodes: tuple[int, ...]
    result: type


@dataclass
class Numbers:
    """The scalars of the graph that `builder` builds, in order: captured numbers, and those computed from them."""

    builder: Builder
    values: list[Any] = field(default_factory=list)  # at the time of the trace
    origins: list[int | Operation] = field(default_factory=list)  # the source of a captured number, or the operation

    def add(self, value: bool | int | float, origin: int | Operation) -> int:
        """The node of a new scalar."""
        self.builder.scalars.append("float" if type(value) is float else "int")
        self.values.append(value)
        self.origins.append(origin)
        return self.builder.scalar(len(self.values) - 1)

    def compute(self, name: str, nodes: Sequence[int]) -> int | None:
        """The node of an operation on scalars and constants; None for other operations and for undefined results."""
        operands = [self.builder.nodes[i] for i in nodes]
        if {x.op for x in operands} not in ({"scalar"}, {"scalar", "constant"}):
            return None
        kind = self.builder.typed(name, tuple(nodes))[1]
        origin = Operation(name, tuple(nodes), TYPES[kind])
        if origin in self.origins:
            node = self.builder.scalar(self.origins.index(origin))
        else:
            try:
                values = [self.values[x.value] if x.op == "scalar" else x.value for x in operands]
                value = origin.result(OPERATIONS[name](*values))
            except (ArithmeticError, ValueError):
                return None
            if type(value) is int and not fits(value, "int"):
                raise Specialise({x.value for x in operands if x.op == "scalar"})
            node = self.add(value, origin)
        return self.builder.cast(node, "bool") if kind == "bool" else node

    def sources(self, scalars: set[int]) -> set[int]:
        """The sources of the captured numbers that these scalars are, or are computed from."""
        found: set[int] = set()
        for i in scalars:
            origin = self.origins[i]
            if isinstance(origin, Operation):
                operands = [self.builder.nodes[j] for j in origin.nodes]
                found |= self.sources({x.value for x in operands if x.op == "scalar"})
            else:
                found.add(origin)
        return found

    def placed(self, num_sources: int) -> tuple[list[int], list[Any], list[Computed]]:
        """How `extend` computes the scalars: their places in its list, the constants, and the computed numbers.

        The list begins with the values of the sources, and then the constants.
        """
        nodes, operations = self.builder.nodes, [x for x in self.origins if isinstance(x, Operation)]
        constants = list(dict.fromkeys(i for x in operations for i in x.nodes if nodes[i].op == "constant"))
        place = {node: num_sources + i for i, node in enumerate(constants)}  # by node
        computed: list[Computed] = []
        for i, origin in enumerate(self.origins):
            if isinstance(origin, Operation):
                operands = tuple([place[node] for node in origin.nodes])
                place[self.builder.scalar(i)] = num_sources + len(constants) + len(computed)
                computed.append(Computed(OPERATIONS[origin.name], operands, origin.result))
            else:
                place[self.builder.scalar(i)] = origin
        places = [place[self.builder.scalar(i)] for i in range(len(self.origins))]
        return places, [nodes[i].value for i in constants], computed
