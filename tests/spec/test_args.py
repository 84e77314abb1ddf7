"""`AttentionArgs`: one tuple for the API, the operators and the plans."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cute_flash import masks, ops
from cute_flash.spec.args import LISTS, SAVED, AttentionArgs, from_schema, to_schema
from tests.arguments import call_args


@pytest.mark.parametrize(("operator", "num_tensors"), [(ops.attention_fwd, 3), (ops.attention_bwd, 7)])
def test_fields_are_the_arguments_of_the_operators(operator: Any, num_tensors: int) -> None:
    arguments = operator._schema.arguments[num_tensors:]
    assert tuple(argument.name for argument in arguments) == AttentionArgs._fields
    # Every argument except the scale has the default of its field.
    for argument in arguments[1:]:
        default = AttentionArgs._field_defaults[argument.name]
        assert argument.has_default_value()
        assert argument.default_value == (None if argument.name in LISTS else default), argument.name
    assert "scale" not in AttentionArgs._field_defaults


def test_lists_of_the_operators_are_tuples_here() -> None:
    types = {argument.name: str(argument.type) for argument in ops.attention_fwd._schema.arguments}
    assert {name for name, kind in types.items() if "List" in kind} == set(LISTS)


def test_a_call_survives_the_schema() -> None:
    table = torch.ones(4)
    args = call_args(
        torch.empty(1, 4, 5, 8), bias=torch.ones(5, 6), mask_mod=masks.causal(2), softcap=2.0, sinks=torch.ones(4),
        score_mod=lambda score, b, h, q, kv: score + table[h],
    )  # fmt: skip
    values = to_schema(args)
    assert [values[AttentionArgs._fields.index(name)] for name in ("block_mask", "block_mask_sizes")] == [None, None]
    again = from_schema(values)
    assert type(again) is AttentionArgs and tuple(again) == tuple(args)
    plain = AttentionArgs(scale=0.5)
    assert from_schema(to_schema(plain)) == plain and from_schema((0.5,)) == plain


def test_what_a_call_may_differentiate() -> None:
    slopes, sinks, bias, table = (torch.ones(4) for _ in range(4))
    args = AttentionArgs(scale=1.0, alibi=slopes, sinks=sinks, bias=bias, captures=(table,))
    assert all(x is y for x, y in zip(args.differentiable, (slopes, sinks, bias, table), strict=True))
    assert set(SAVED) <= set(AttentionArgs._fields)
    assert not args.bias_needs_grad and args._replace(needs_grad=(True, False)).bias_needs_grad


def test_only_captures_of_score_mod_have_gradients() -> None:
    floats, ints, mask = torch.ones(4, requires_grad=True), torch.arange(6), torch.ones(4, requires_grad=True)
    args = call_args(
        torch.empty(1, 4, 5, 8),
        score_mod=lambda score, b, h, q, kv: score + ints[kv] * floats[h],
        mask_mod=lambda b, h, q, kv: mask[h] > 0,
    )
    assert args.needs_grad == (False, False, True, True)
    assert args.captures_needing_grad == (1,)


def test_keys_hold_shapes_and_no_values() -> None:
    """A plan depends only on the key: two calls with equal keys launch the same kernels."""
    args = AttentionArgs(scale=1.0, alibi=torch.ones(4), dropout=0.1, rng=torch.zeros(2, dtype=torch.int64))
    other = args._replace(scale=2.0, alibi=torch.zeros(4), rng=torch.ones(2, dtype=torch.int64))
    assert args.key == other.key and hash(args.key) == hash(other.key)
    assert args._replace(alibi=torch.ones(2, 4)).key != args.key
    plain = AttentionArgs(scale=1.0)
    assert plain._replace(scale=2.0).key == plain.key


def test_tensors_are_noticed() -> None:
    plain = AttentionArgs(scale=1.0, softcap=2.0, window_left=3)
    assert not plain.tensors
    tensors: dict[str, Any] = {
        "alibi": torch.ones(4), "sinks": torch.ones(4), "bias": torch.ones(1), "rng": torch.ones(2),
        "cu_seqlens_q": torch.ones(2), "captures": (torch.ones(1),), "block_mask": (torch.ones(1),),
    }  # fmt: skip
    for name, value in tensors.items():
        assert plain._replace(**{name: value}).tensors, name


def test_arguments_with_features_and_mods_are_those_of_replace() -> None:
    """`with_features` and `with_mods` also list the tensors, in any combination of present and absent ones."""
    x, y, z = torch.ones(4), torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    offsets = torch.zeros(3, dtype=torch.int32)
    varlen, block_sparse = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}, {"block_mask": (z, y, z, y)}
    for base in (AttentionArgs(scale=1.0, **fields) for fields in ({}, varlen, block_sparse)):
        choices = itertools.product((None, x), (None, y), (None, z), (None, y[None, None]), ((), (y, x)))
        for alibi, sinks, rng, bias, captures in choices:
            args = base.with_features(alibi, sinks, 0.5, rng).with_mods(bias, "text", captures, (1.0,), (True,))
            expected = base._replace(
                alibi=alibi, sinks=sinks, dropout=0.5, rng=rng, bias=bias, mod_graphs="text", captures=captures,
                scalars=(1.0,), needs_grad=(True,),
            )  # fmt: skip
            assert all(mine is other or mine == other for mine, other in zip(args, expected, strict=True))
            assert all(mine is other for mine, other in zip(args.tensors, expected.tensors, strict=True))
            assert args.key == expected.key


# A value of each field that differs from the default; a plan depends on all of them.
KEYED = {
    "window_left": 3, "window_right": 0, "attention_chunk": 5, "softcap": 2.0, "alibi": torch.ones(2),
    "sinks": torch.ones(2), "dropout": 0.5, "rng": torch.zeros(2, dtype=torch.int64), "return_max_logit": True,
    "bias": torch.ones(1, 1, 1, 1), "mod_graphs": "text", "captures": (torch.ones(3),), "needs_grad": (True,),
    "block_mask": (torch.ones(1),), "block_mask_sizes": (128,), "cu_seqlens_q": torch.zeros(2, dtype=torch.int32),
    "cu_seqlens_k": torch.zeros(2, dtype=torch.int32), "seqused_k": torch.zeros(1, dtype=torch.int32),
    "out_fp32": True, "deterministic": True, "batch_invariant": True, "kernel_family": "sm80",
    "dropout_origin": (1, 0, 0, 2),
}  # fmt: skip


def test_the_key_covers_every_field_that_a_plan_depends_on() -> None:
    assert set(KEYED) == set(AttentionArgs._fields[4:])
    plain = AttentionArgs(scale=1.0)
    # Calls with tensors, such as offsets, have keys that are built field by field.
    varlen = plain._replace(cu_seqlens_q=torch.zeros(3, dtype=torch.int32))
    for name, value in KEYED.items():
        if name not in ("cu_seqlens_k", "seqused_k"):
            assert plain._replace(**{name: value}).key != plain.key, name
        assert varlen._replace(**{name: value}).key != varlen.key, name
