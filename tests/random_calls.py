"""Random calls of `attn` and `attn_varlen` over all features, checked with the oracle of `tests.definition`.

The compiled-in properties of a call come from a list of `Kind`s, so that many calls share a kernel. Lengths, heads,
strides, alignment and the size of scores are drawn for each call. The oracle is differentiated by autograd and shares
no code with the package.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import cute_flash
from cute_flash.errors import UnsupportedError
from tests.definition import Rounding, attention
from tests.lengths import Lengths

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RNG = (0x0123_4567_89AB_CDEF, 9)  # (seed, offset) of dropout
# Document ids that differ above bit 32 only.
LARGE_IDS = torch.tensor([0, 1 << 33, -(1 << 40), 1 << 62])
# A result may have this many times the error of the yardstick: its mean, its maximum, and both of few numbers, whose
# rounding errors do not average out.
TIMES_MEAN, TIMES_MAX, TIMES_FEW, FEW = 2.0, 3.0, 8.0, 600
DRAWS = 8  # computations of the oracle with rounding errors, if one is not enough
FEW_ROWS = 40  # of q, k, v and out: the elements of a row have a common error
# ... and this error: relative to the result (half a unit of the dtype), and absolute, for sums that cancel. There are
# three absolute errors: of the mean, of the maximum, and of few numbers.
FLOORS = {
    BF16: (2.0**-8, 1e-5, 1e-4, 5e-3),
    FP16: (2.0**-11, 1e-5, 1e-4, 5e-3),
    FP32: (2e-6, 2e-6, 4e-5, 4e-5),
    FP64: (1e-12, 1e-12, 1e-12, 1e-12),
}
# The error of Δ, relative to the norm of its terms.
DELTA_ERRORS = {BF16: 2.0**-22, FP16: 2.0**-22, FP32: 2.0**-21, FP64: 0.0}
LSE_FLOORS = 1e-5, 5e-5, 5e-5, 5e-5  # of 16-bit calls
NUM_KINDS = 40  # of each family
# Head dims above 256 of keys and values: equal and different ones, the widest, and some that are padded.
WIDE = ((512, 512), (264, 264), (320, 320), (384, 384), (448, 448), (512, 256), (320, 512), (408, 72))
NUM_WIDE_KINDS = 24  # of each family


@dataclass(frozen=True)
class Kind:
    """The compiled-in properties of a call."""

    family: str
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    bounds: tuple[bool, bool]
    features: tuple[str, ...]
    is_varlen: bool = False
    deterministic: bool = False
    has_dlse: bool = False
    has_chunk: bool = False

    @property
    def id(self) -> str:
        band = "l" * self.bounds[0] + "r" * self.bounds[1] or "full"
        flags = ["varlen"] * self.is_varlen + ["deterministic"] * self.deterministic + ["dlse"] * self.has_dlse
        flags += ["chunk"] * self.has_chunk
        width = f"d{self.head_dim}" + f"v{self.head_dim_v}" * (self.head_dim_v != self.head_dim)
        return "-".join((self.family, str(self.dtype)[6:], width, band, *self.features, *flags))

    @staticmethod
    def drawn(seed: int, family: str) -> Kind:
        pick = random.Random(f"{seed} {family}")
        # No kernel of sm90 takes fp32.
        dtype = pick.choice([BF16, BF16, FP16, FP32 if family == "sm80" else FP16])
        widths = [(64, 64), (128, 128), (40, 40), (96, 96), (128, 64)]
        widths += [] if dtype == FP32 else [(256, 256), (192, 128), (64, 64), (128, 128)]
        names = ["softcap", "alibi", "sinks", "dropout", "bias", "score_mod", "mask_mod"]
        features = tuple(name for name in names if pick.random() < pick.choice([0.0, 0.2, 0.5]))
        return Kind(
            family, dtype, *pick.choice(widths), bounds=pick.choice([(False, False), (False, True), (True, True)]),
            features=features, is_varlen=pick.random() < 0.3, deterministic=pick.random() < 0.2,
            has_dlse=pick.random() < 0.4, has_chunk=pick.random() < 0.2,
        )  # fmt: skip


def kinds(family: str, num: int = NUM_KINDS) -> list[Kind]:
    return list(dict.fromkeys(Kind.drawn(seed, family) for seed in range(num)))


def wide_kinds(family: str) -> list[Kind]:
    """Kinds with each of the head dims `WIDE`: one plain and causal, and others with drawn properties."""
    plain = [Kind(family, BF16, *widths, bounds=(False, True), features=()) for widths in WIDE]
    others = [Kind.drawn(NUM_KINDS + i, family) for i in range(NUM_WIDE_KINDS - len(plain))]
    drawn = [
        # fp32 kernels have head dims up to 128.
        replace(kind, head_dim=d, head_dim_v=dv, dtype=FP16 if kind.dtype == FP32 else kind.dtype)
        for kind, (d, dv) in zip(others, cycle(WIDE), strict=False)
    ]
    return [*plain, *drawn]


@dataclass(frozen=True)
class Call:
    """A call: leaves, in fp64, and keywords as functions of the leaves."""

    kind: Kind
    leaves: dict[str, Tensor]
    options: Callable[[dict[str, Tensor]], dict[str, Any]]
    lengths: Lengths | None
    views: dict[str, str] = field(default_factory=dict)  # how q, k and v lie in memory

    @property
    def is_exact(self) -> bool:
        return self.kind.dtype in (FP32, FP64)

    def __str__(self) -> str:
        sizes = {name: tuple(x.shape) for name, x in self.leaves.items()}
        return f"{self.kind.id} {sizes} {self.lengths} {self.views}"


def drawn(seed: int, kind: Kind, device: str = "cpu", longest: int = 300) -> Call:
    """The random call of a seed."""
    pick, generator = random.Random(f"{seed} {kind.id}"), torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device, FP64)

    batch, heads_kv, group = pick.choice([1, 2, 3]), pick.choice([1, 2, 3]), pick.choice([1, 2, 4])
    heads, lengths = heads_kv * group, None
    sizes = [n for n in (1, 2, 17, 63, 64, 65, 100, 127, 129, 200, 257, 300, 1, 3) if n <= longest]
    sq, sk = pick.choice(sizes), pick.choice(sizes)
    if kind.is_varlen:
        queries, keys = ([pick.choice([0, 1, *sizes]) for _ in range(batch)] for _ in range(2))
        queries[pick.randrange(batch)], keys[pick.randrange(batch)] = sq, sk
        used = [pick.randrange(n + 1) for n in keys] if pick.random() < 0.3 else None
        lengths = Lengths(queries, keys, used, (pick.choice([0, 5]), pick.choice([0, 9])))
        sq, sk = max(queries), max(keys)
        rows, columns = lengths.totals
        shapes = ((rows, heads), (columns, heads_kv), (columns, heads_kv))
    else:
        shapes = ((batch, heads, sq), (batch, heads_kv, sk), (batch, heads_kv, sk))
    leaves = {
        name: normal(*shape, kind.head_dim_v if name == "v" else kind.head_dim) for name, shape in zip("qkv", shapes)
    }
    if pick.random() < 0.2:
        # Sharp scores: the weights of a row are those of one or two keys.
        leaves["q"] = (leaves["q"] * 6).to(kind.dtype).double()
    options: dict[str, Any] = {}
    left, right = (pick.choice([0, 1, 5, pick.randrange(longest)]) if has else None for has in kind.bounds)
    options |= {"window": (left, right)} if left is not None else {"causal": True} if right is not None else {}
    if kind.has_chunk:
        options["attention_chunk"] = pick.choice([1, 7, 64, 100, 128, 200])
    if kind.deterministic:
        options["deterministic"] = True
    if "softcap" in kind.features:
        options["softcap"] = pick.choice([0.5, 3.0, 30.0])
    if "dropout" in kind.features:
        options["dropout"] = pick.choice([0.1, 0.5])
    if "alibi" in kind.features:
        leaves["alibi"] = normal(*pick.choice([(heads,), (batch, heads)]), dtype=FP32) * 0.1
    if "sinks" in kind.features:
        leaves["sinks"] = normal(heads, dtype=FP32)
    if "bias" in kind.features:
        full = batch, heads, sq, sk
        shape = [pick.choice((1, n)) for n in full[:2]] + list(pick.choice([full[2:], full[2:], (1, sk)]))
        leaves["bias"] = normal(*shape)
        if kind.is_varlen:
            options |= {"max_seqlen_q": sq, "max_seqlen_k": sk}
    if "score_mod" in kind.features:
        leaves["table"] = normal(heads, 2 * longest + 1, dtype=FP32) * 0.5
    ids = torch.randint(len(LARGE_IDS), (batch, max(sq, sk)), generator=generator)
    documents = LARGE_IDS[ids].to(device)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (documents[b, i] == documents[b, j]) | ((i + j) % 7 == 0)

    def keywords(x: dict[str, Tensor]) -> dict[str, Any]:
        made = {**options, **{name: x[name] for name in ("alibi", "sinks", "bias") if name in x}}
        if "score_mod" in kind.features:
            table = x["table"]
            made["score_mod"] = lambda s, b, h, i, j: s + table[h, i - j + longest] + 0.5 * torch.tanh(s)
        if "mask_mod" in kind.features:
            made["mask_mod"] = mask_mod
        return made

    views = {name: pick.choice(["plain", "plain", "swapped", "misaligned", "spaced", "expanded"]) for name in "qkv"}
    for name, view in views.items():
        if view == "expanded":
            # One batch element, or one token, for all.
            leaves[name] = leaves[name][:1].expand_as(leaves[name])
    return Call(kind, leaves, keywords, lengths, views)


# ---- the call, and the oracle


def placed(x: Tensor, view: str, dtype: torch.dtype) -> Tensor:
    """A tensor with these values whose memory is laid out as `view` says."""
    x = x.detach()
    if view == "expanded" and len(x) > 0:
        return x[:1].to(dtype).expand_as(x)
    x = x.to(dtype)
    if view == "swapped":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if view == "misaligned":
        return torch.empty(x.numel() + 1, dtype=dtype, device=x.device)[1:].view(x.shape).copy_(x)
    if view == "spaced":
        return torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, dtype=dtype, device=x.device)[..., :-8].copy_(x)
    return x.contiguous()


def inputs_of(call: Call) -> dict[str, Tensor]:
    """The tensors of the call in its dtype; per-head numbers and tables are fp32."""
    made = {}
    for name, x in call.leaves.items():
        dtype = call.kind.dtype if name in (*"qkv", "bias") else FP64 if call.kind.dtype == FP64 else FP32
        made[name] = placed(x, call.views.get(name, "plain"), dtype).requires_grad_()
    return made


def attend(call: Call, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    options = call.options(x)
    if call.lengths is not None:
        return cute_flash.attn_varlen(
            x["q"], x["k"], x["v"], return_lse=True, **call.lengths.args(x["q"].device), **options
        )
    return cute_flash.attn(x["q"], x["k"], x["v"], return_lse=True, **options)


def oracle(call: Call, x: dict[str, Tensor], rounded: Rounding | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) by definition, in the dtype of q; sequence by sequence for a varlen batch."""
    options = {**call.options(x), "rng": RNG}
    if call.lengths is None:
        return attention(x["q"], x["k"], x["v"], options, rounded=rounded)
    rows, heads = x["q"].shape[:2]
    out, lse = x["q"].new_zeros(rows, heads, x["v"].shape[-1]), x["q"].new_full((heads, rows), -torch.inf)
    for b, (queries, keys) in enumerate(call.lengths.spans()):
        parts = [x[name][span].transpose(0, 1)[None] for name, span in (("q", queries), ("k", keys), ("v", keys))]
        one = dict(options)
        if "bias" in one:
            bias, sizes = one["bias"], (queries.stop - queries.start, keys.stop - keys.start)
            one["bias"] = bias[b : b + 1] if len(bias) > 1 else bias
            one["bias"] = one["bias"][
                :, :, : sizes[0] if bias.shape[2] > 1 else 1, : sizes[1] if bias.shape[3] > 1 else 1
            ]
        found, found_lse = attention(*parts, one, b=b, rounded=rounded)
        out = out.index_put((torch.arange(rows, device=out.device)[queries],), found[0].transpose(0, 1))
        lse = lse.index_put(
            (torch.arange(heads, device=lse.device)[:, None], torch.arange(rows, device=lse.device)[queries]),
            found_lse[0],
        )
    return out, lse


def results(
    run: Callable[[Call, dict[str, Tensor]], tuple[Tensor, Tensor]],
    call: Call,
    x: dict[str, Tensor],
    seed: int,
    delta_errors: int | None = None,
) -> dict[str, Tensor]:
    """out, lse and all gradients.

    `delta_errors`: the seed of the signs of errors of Δ, the row sum of dO · O. The gradients have such errors, as
    sums of tensor cores have them, and in fp32 as products of pairs of fp16 numbers have them. They act on the scores
    as a gradient of the LSE does. In 16 bits, the oracle also computes Δ from the rounded output.
    """
    out, lse = run(call, x)
    generator = torch.Generator().manual_seed(seed)
    dout, dlse = (torch.randn(y.shape, generator=generator).to(call.kind.dtype) for y in (out, lse))
    terms = [(out, dout)] + [(lse, dlse)] * call.kind.has_dlse
    # Rows without keys have an LSE of -inf and no gradient.
    if delta_errors is not None:
        generator.manual_seed(delta_errors)
        error = DELTA_ERRORS[call.kind.dtype] * (out.detach() * dout.to(out.device, out.dtype)).norm(dim=-1)
        signs = torch.randint(2, error.shape, generator=generator).to(error) * 2 - 1
        terms.append((lse, error * signs if call.lengths is None else (error * signs).mT))
    loss = sum((y.masked_fill(y == -torch.inf, 0.0) * d.to(y.device, y.dtype)).sum() for y, d in terms)
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": g for name, g in zip(x, grads)}}


def check(call: Call, seed: int) -> str:
    """Compare the results of a call with the oracle: "right", "forward" if its gradient is refused, or "refused"."""
    x, outcome = inputs_of(call), "right"
    with known_rng(x["q"].device):
        try:
            found = results(attend, call, x, seed)
        except UnsupportedError:
            try:
                with torch.no_grad():
                    found = dict(zip(("out", "lse"), attend(call, x)))
            except UnsupportedError:
                return "refused"
            outcome = "forward"
        again = attend(call, {name: y.detach() for name, y in x.items()})
    exact = results(oracle, call, {name: y.detach().double().requires_grad_() for name, y in x.items()}, seed)
    assert torch.equal(again[0], found["out"]) and torch.equal(again[1], found["lse"]), "other bits in a second call"
    # The error of a sum of few numbers, as that of a slope's gradient, may be near 0 by chance in one computation.
    for num_draws in (1, DRAWS):
        rough = [rough_results(call, x, seed, draw) for draw in range(num_draws)]
        texts = [
            misfit(name, value, exact[name], [one[name] for one in rough], call, exact["lse"].numel())
            for name, value in found.items()
        ]
        if not any(texts):
            return outcome
    raise AssertionError("; ".join(filter(None, texts)))


def rough_results(call: Call, x: dict[str, Tensor], seed: int, draw: int) -> dict[str, Tensor]:
    """The oracle's results with the rounding errors of a kernel; every draw has other errors of the same size.

    The grids are eighths, so that a P of 1, the only one of a row with one visible key, has no error.
    """
    if call.is_exact:
        same = {name: y.detach().to(call.kind.dtype).requires_grad_() for name, y in x.items()}
        return results(oracle, call, same, seed, delta_errors=draw)
    wide = {name: y.detach().double().requires_grad_() for name, y in x.items()}
    rounding = Rounding(call.kind.dtype, 1.0 + draw / DRAWS)
    return results(partial(oracle, rounded=rounding), call, wide, seed, delta_errors=draw)


def misfit(name: str, value: Tensor, exact: Tensor, rough: list[Tensor], call: Call, num_rows: int) -> str:
    """What is wrong with a result, or "". The yardstick is the largest of the errors of `rough`."""
    if value.shape != exact.shape:
        return f"{name}: shape {tuple(value.shape)}"
    empty = exact == -torch.inf
    if not torch.equal(value == -torch.inf, empty):
        return f"{name}: -inf in other places"
    value, exact, *rough = (y.double().masked_fill(empty, 0.0) for y in (value, exact, *rough))
    if not bool(value.isfinite().all()):
        return f"{name}: not finite"
    if value.numel() == 0:
        return ""
    size, error = exact.abs(), (value - exact).abs()
    relative, *floors = FLOORS[call.kind.dtype] if name != "lse" or call.is_exact else LSE_FLOORS
    is_row = name in ("out", "dq", "dk", "dv")
    is_few = value.numel() < FEW or (is_row and value.numel() < FEW_ROWS * value.shape[-1])
    is_few = is_few or (name.startswith("d") and num_rows < FEW_ROWS)  # Δ has one error for each query of a head
    for measure, times, floor in ((torch.mean, TIMES_MEAN, floors[0]), (torch.max, TIMES_MAX, floors[1])):
        yardstick = max(float(measure((one - exact).abs())) for one in rough)
        allowed = relative * float(measure(size))
        allowed += TIMES_FEW * yardstick + floors[2] if is_few else times * yardstick + floor
        if float(measure(error)) > allowed:
            return (
                f"{name}: {measure.__name__} error {float(measure(error)):.3e}, allowed {allowed:.3e}, "
                f"size {float(measure(size)):.3e}"
            )
    return ""


@contextmanager
def known_rng(device: torch.device) -> Iterator[None]:
    """Every call with dropout gets the seed `RNG`."""
    with mock.patch.object(cute_flash.api, "_seed", lambda q: torch.tensor(RNG, device=device)):
        yield
