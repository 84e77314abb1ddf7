"""`cute-flash`: try the kernels, find out what is wrong with an installation, and see what a shape costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cute_flash.version import __version__

if TYPE_CHECKING:
    from cute_flash.planning.plan import CompileKey, Plan
    from cute_flash.spec.arch import ArchSpec
    from cute_flash.spec.band import Band

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Presence of a bound is compiled in, its value is not: 0 stands for any.
MASKS: dict[str, tuple[int | None, int | None]] = {
    "full": (None, None),
    "causal": (None, 0),
    "window": (0, 0),
    "left": (0, None),
}
# Long enough for the tile of long sequences; otherwise no part of a compiled kernel.
LENGTH = 1 << 16


class Refused(Exception):
    """Arguments that no kernel serves, or that contradict each other."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Around checks and planning only: a ValueError from later work is a bug and keeps its traceback."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 fine, 1 a bad answer (a wrong result, a spill, something broken), 2 a wrong argument."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except Refused as error:
        print(f"cute-flash: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cute-flash: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _shape(text: str) -> tuple[int, int, int, int]:
    """B,H,S,D; B,S,D and S,D mean one head, as for `attn`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape: write B,H,S,D (or B,S,D, or S,D), all positive, such as 2,16,4096,128"
        )
    *batch_and_heads, length, head_dim = numbers
    batch, heads = [*batch_and_heads, 1, 1][:2]
    return batch, heads, length, head_dim


def _side(text: str) -> int | None:
    """One side of a window."""
    if text.lower() in ("none", "inf"):
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no side of a window: write a number of keys, or none")
    return int(text)


def _list_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        for item in text.split(","):
            if item not in choices:
                raise argparse.ArgumentTypeError(f"{item!r}: write some of {','.join(choices)}")
        return text.split(",")

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _add_mask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="a query sees the keys up to its own position")
    parser.add_argument(
        "--window",
        nargs=2,
        type=_side,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help="keys before and after its own position that a query sees; none: all of them",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cute-flash", description=__doc__)
    parser.add_argument("--version", action="version", version=f"cute-flash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    add("demo", _demo, "run attention here, check it against torch, and show what the kernels cost")

    sub = add("doctor", _doctor, "what is installed, what is wrong, and how to put it right")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("explain", _explain, "plan, FLOPs, bytes and roofline position of a shape on a GPU")
    sub.add_argument("shapes", nargs="+", type=_shape, metavar="B,H,S,D", help="such as 2,16,4096,128")
    sub.add_argument("--kv-heads", type=_positive, metavar="N", help="K/V heads (default: as many as H)")
    sub.add_argument("--seqlen-k", type=_positive, metavar="N", help="keys (default: as many as S)")
    sub.add_argument("--value-dim", type=_positive, metavar="N", help="width of the values (default: D)")
    _add_mask(sub)
    sub.add_argument("--gpu", help="A100, A10, L40S, H100, H200 or sm_xx (default: the GPU here, else A100)")
    sub.add_argument("--json", action="store_true", help="print a JSON list, one entry a shape")

    sub = add("inspect", _inspect, "registers, spills and instructions of a kernel, compiled without a GPU")
    sub.add_argument("--head-dim", type=_positive, default=128, metavar="D", help="default: %(default)s")
    _add_mask(sub)
    sub.add_argument(
        "--seqlen-k", type=_positive, metavar="S", help="short sequences may have a tile of their own"
    )
    sub.add_argument("--arch", metavar="sm_xx", help="default: the GPU here, else sm_80")
    sub.add_argument("--sass", type=Path, metavar="FILE", help="write the disassembly")
    sub.add_argument("--ptx", type=Path, metavar="FILE", help="write the PTX")

    sub = add("precompile", _precompile, "compile kernels into the cache, without a GPU")
    sub.add_argument("--arch", metavar="sm_xx", help="default: the GPU here")
    sub.add_argument("--head-dims", type=_positives, default="64,128", help="default: %(default)s")
    sub.add_argument("--dtypes", type=_list_of(DTYPES), default="bf16,fp16", help="default: %(default)s")
    sub.add_argument(
        "--masks",
        type=_list_of(MASKS),
        default="full,causal,window",
        help=f"of {', '.join(MASKS)} (default: %(default)s); window: both sides, left: that side alone",
    )
    sub.add_argument("--jobs", type=_positive, default=1, help="processes, about 1 GB each (default: 1)")

    sub = add("cache", _cache, "where compiled kernels are kept, and how many")
    sub.add_argument("--clear", action="store_true", help="delete them")
    return parser


def _arch(name: str | None) -> ArchSpec | None:
    """The one named, else that of CUTE_FLASH_ARCH, else that of the first GPU here, else none."""
    from cute_flash.spec import arch
    from cute_flash.spec.arch import by_name

    if name is not None:
        return by_name(name)
    return arch.override() or (arch.detect(0) if arch.has_gpu() else None)


def _kernels(arch: ArchSpec, head_dim: int, dtype: str, band: Band) -> list[Plan]:
    """A plan for each kernel that a problem of this head dim, dtype and kind of mask may run."""
    from cute_flash.planning.plan import plan
    from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD
    from cute_flash.spec.problem import Problem

    # Short sequences may have a tile of their own, and so may the few rows of heads that share keys.
    lengths = [LENGTH, *sorted({row.max_keys for row in SM90_FWD if row.max_keys})]
    shapes = [(heads, rows, keys) for keys in lengths for heads, rows in ((1, LENGTH), (64, 1))]
    problems = [Problem(1, heads, 1, rows, keys, head_dim, dtype, band) for heads, rows, keys in shapes]
    found: dict[CompileKey, Plan] = {}
    for problem in problems:
        chosen = plan(problem, arch, is_packable=True)
        found.setdefault(chosen.key, chosen)
    return list(found.values())


def _demo(args: argparse.Namespace) -> int:
    from cute_flash.tools.demo import demo

    return demo()


def _doctor(args: argparse.Namespace) -> int:
    from cute_flash.tools import doctor

    checks = doctor.examine()
    print(json.dumps(doctor.as_dict(checks), indent=2) if args.json else "\n".join(doctor.lines(checks)))
    return 0 if doctor.is_sound(checks) else 1


def _explain(args: argparse.Namespace) -> int:
    from cute_flash.spec.arch import SM_80
    from cute_flash.spec.band import Band
    from cute_flash.spec.problem import Problem
    from cute_flash.tools.explain import Explanation

    found = []
    with _refusing():
        arch, band = _arch(args.gpu) or SM_80, Band.of(args.causal, args.window)
        for batch, heads, length, head_dim in args.shapes:
            heads_kv, length_k = args.kv_heads or heads, args.seqlen_k or length
            sizes, width_v = (batch, heads, heads_kv, length, length_k, head_dim), args.value_dim
            problem = Problem(*sizes, DTYPES[args.dtype], band, None if width_v == head_dim else width_v)
            found.append(Explanation.of(problem, arch))
    if args.json:
        print(json.dumps([one.as_dict() for one in found], indent=2))
    else:
        print("\n\n".join("\n".join(one.lines()) for one in found))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from cute_flash.jit.progress import ticking
    from cute_flash.jit.resources import disassemble, nvdisasm, resources
    from cute_flash.planning import plan as planning
    from cute_flash.spec.arch import SM_80
    from cute_flash.spec.band import Band
    from cute_flash.spec.problem import Problem
    from cute_flash.tools.explain import aligned

    if args.sass and nvdisasm() is None:
        raise Refused("--sass: no disassembler found; pip install nvidia-cuda-nvdisasm")
    with _refusing():
        sizes = (1, 1, 1, LENGTH, args.seqlen_k or LENGTH, args.head_dim)
        problem = Problem(*sizes, DTYPES[args.dtype], Band.of(args.causal, args.window))
        plan = planning.plan(problem, _arch(args.arch) or SM_80)
    with ticking(f"compiling {plan.key.kernel} for {plan.key.target}"):
        found = resources(plan)
    lines = [f"kernel {plan.key.kernel}", f"tile {plan.tile}", *found.lines()]
    if found.serialised_wgmma:
        lines.append(
            f"wgmma serialised, or registers not moved, by ptxas: {', '.join(found.serialised_wgmma)}"
        )
    print("\n".join(aligned(lines)))
    if args.sass:
        args.sass.write_text(disassemble(found.cubin))
    if args.ptx:
        args.ptx.write_text(found.ptx)
    for path in filter(None, (args.sass, args.ptx)):
        print(f"wrote {path}")
    return 1 if found.spill_bytes or found.serialised_wgmma else 0


def _precompile(args: argparse.Namespace) -> int:
    import itertools

    from cute_flash.jit.compile import precompile_all
    from cute_flash.jit.disk import DiskCache
    from cute_flash.spec.band import Band

    wanted = itertools.product(args.head_dims, args.dtypes, args.masks)
    with _refusing():
        arch = _arch(args.arch)
        if arch is None:
            raise Refused("no GPU here: name the one to compile for, such as --arch sm_80")
        # All plans first: an unsupported head dim is refused before any time is spent.
        plans = [
            (f"D={dim} {dtype} {mask}", plan)
            for dim, dtype, mask in wanted
            for plan in _kernels(arch, dim, DTYPES[dtype], Band(*MASKS[mask]))
        ]
    cache = DiskCache.default()
    if not cache.is_persistent:
        print("cute-flash: the cache folder cannot be used; see `cute-flash doctor`", file=sys.stderr)
        return 1
    compiled = 0
    targets = ", ".join(sorted({plan.key.target for _, plan in plans}))
    print(f"{len(plans)} kernel(s) for {targets}, {args.jobs} at a time", file=sys.stderr)
    results = precompile_all([plan.key for _, plan in plans], args.jobs)
    for i, (is_new, (name, plan)) in enumerate(zip(results, plans), 1):
        compiled += is_new
        tile = f"{plan.tile.tile_m}x{plan.tile.tile_n}{' packed' if plan.packs_heads else ''}"
        state = "compiled" if is_new else "already there"
        print(f"[{i}/{len(plans)}] {name} {tile}: {state}", file=sys.stderr, flush=True)
    print(f"{cache.folder}: {compiled} kernel(s) compiled, {len(plans) - compiled} already there")
    return 0


def _cache(args: argparse.Namespace) -> int:
    from cute_flash.jit.disk import DiskCache

    cache = DiskCache.default()
    entries = cache.entries()
    size = sum(path.stat().st_size for path in entries)
    if args.clear:
        cache.clear()
    print(f"{cache.folder}: {len(entries)} kernel(s), {size / 1e6:.1f} MB{' deleted' if args.clear else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
