"""The command `cute-flash`.

Each subcommand imports its own modules, so that `--help` and `--version` import neither torch nor the DSL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_flash.errors import InstallationError
from cute_flash.spec.family import FAMILIES
from cute_flash.tools import studies
from cute_flash.version import __version__

if TYPE_CHECKING:
    from cute_flash.spec.arch import ArchSpec

DESCRIPTION = "Exact attention for NVIDIA Ampere and Hopper GPUs."
EPILOG = """\
examples:
  cute-flash doctor            # is everything installed?
  cute-flash demo              # is the result right on this machine?
  cute-flash selftest          # are the results of all kinds of calls right on this GPU?
  cute-flash explain --help    # options and examples of a command"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CACHE_DTYPES = {"fp8": "float8_e4m3fn", "same": ""}
PASSES = ("forward", "backward")
MASKS = ("full", "causal", "window", "left", "chunk")
BATCHES = ("dense", "varlen")
# Links between GPUs, as in `layouts.studies.cp_cost.LINKS`.
LINKS = ("nvlink", "infiniband")
FEATURES = ("softcap", "alibi", "sinks", "dropout", "return_max_logit")


# Keeps the line breaks of the examples.
HELP_FORMATTER = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26)


class UsageError(Exception):
    """Arguments that are contradictory, or that no kernel supports."""


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn a ValueError of checks and planning into a `UsageError`.

    A ValueError from later steps is a bug and keeps its traceback.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success; 1: a wrong result, a spill, serialised wgmma, a broken installation or a file error; 2: a wrong
    argument; 130: interrupted; 141: the reader of the output closed it.
    """
    argv = sys.argv[1:] if argv is None else argv
    # torch prints it at import if numpy, which it does not require, is not installed.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        args = _parser(argv).parse_args(argv)
        status = args.command(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes stdout again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UsageError, studies.MissingStudyError) as error:
        print(f"cute-flash: {error}", file=sys.stderr)
        return 2
    except (InstallationError, OSError) as error:
        print(f"cute-flash: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _shape(text: str) -> tuple[int, int, int, int]:
    """Parse B,H,S,D. Fewer numbers are refused: with a number missing, S would be taken for the head dim."""
    try:
        batch, heads, length, head_dim = (int(part) for part in text.split(","))
        if min(batch, heads, length, head_dim) > 0:
            return batch, heads, length, head_dim
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a shape: write B,H,S,D, four positive numbers, such as 2,16,4096,128"
    )


def _side(text: str) -> int | None:
    """Parse one bound of a window."""
    if text.lower() in ("none", "inf"):
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a window size: write a number of keys, or none")
    return int(text)


def _list_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        for item in text.split(","):
            if item not in choices:
                raise argparse.ArgumentTypeError(f"{item!r}: write some of {','.join(choices)}")
        return text.split(",")

    return parse


def _names(text: str) -> list[str]:
    return text.split(",")


def _feature_sets(text: str) -> list[tuple[str, ...]]:
    """Parse "plain,softcap,alibi+dropout": the features of each kernel, in the order of `FEATURES`."""
    sets = []
    for item in text.split(","):
        names = () if item == "plain" else tuple(item.split("+"))
        for name in names:
            if name not in FEATURES:
                raise argparse.ArgumentTypeError(
                    f"{name!r}: write plain, some of {','.join(FEATURES)}, or several together as alibi+dropout"
                )
        sets.append(tuple(name for name in FEATURES if name in names))
    return sets


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _head_dims(text: str) -> list[tuple[int, int | None]]:
    """Parse "64,192/128": head dims of q and k, with that of v after a slash if it differs."""
    pairs = (part.partition("/") for part in text.split(","))
    return [(_positive(q), _positive(v) if slash else None) for q, slash, v in pairs]


def _add_mask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of q, k and v (default: %(default)s)")
    parser.add_argument("--causal", action="store_true", help="mask the keys after a query's own position")
    parser.add_argument(
        "--window",
        nargs=2,
        type=_side,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help="keep LEFT keys before and RIGHT keys after a query's own position; none: unbounded",
    )
    parser.add_argument(
        "--attention-chunk", type=_positive, metavar="N", help="keep the keys of a query's own chunk of N keys"
    )


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, *examples: str
) -> argparse.ArgumentParser:
    """Add a command with its one-sentence description, and examples of its arguments."""
    title = f"{text[0].upper()}{text[1:]}."
    sub = commands.add_parser(name, help=text, description=title, formatter_class=HELP_FORMATTER)
    sub.epilog = "\n".join(["examples:", *(f"  {sub.prog} {example}".rstrip() for example in examples)])
    return sub


def _parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands. A study, which is imported for it, has its options only if `argv` begins with it."""
    parser = argparse.ArgumentParser(
        prog="cute-flash", description=DESCRIPTION, epilog=EPILOG, formatter_class=HELP_FORMATTER
    )
    parser.add_argument("--version", action="version", version=f"cute-flash {__version__}", help="show the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, *examples: str
    ) -> argparse.ArgumentParser:
        sub = add_command(commands, name, text, *examples)
        sub.set_defaults(command=command)
        return sub

    add("demo", _demo, "run attention, compare it with torch, and show what the kernels cost", "")

    sub = add("doctor", _doctor, "check the installation and say how to fix what is wrong", "", "--json")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add(
        "selftest",
        _selftest,
        "check calls of all kinds on this GPU, time a few beside torch's SDPA, and write a JSON file",
        "",
        "--no-bench --json result.json",
        "--family sm80  # mma.sync kernels only",
    )
    sub.add_argument(
        "--json", type=Path, metavar="FILE", help="the file to write (default: cute-flash-selftest-<gpu>.json, here)"
    )
    sub.add_argument("--no-bench", action="store_true", help="leave out the benchmark")
    sub.add_argument(
        "--family", choices=FAMILIES, default="", help="kernel family of all calls (default: all that the GPU can run)"
    )

    sub = add(
        "explain",
        _explain,
        "show the kernel, tile, FLOPs, bytes and roofline position of a shape",
        "2,16,4096,128 --causal --gpu A100",
        "2,16,4096,128 --causal --legend  # what the lines mean",
        "1,64,1,128 --kv-heads 8 --seqlen-k 32768  # few queries: attn splits the keys",
        "8,32,1,128 --kv-heads 8 --cache-len 8192 --page-size 16 --cache-dtype fp8  # attn_decode",
        "32,128,1,576 --cache-len 4096 --value-dim 512 --page-size 64  # attn_decode with one cache (MLA)",
        "1,32,131072,128 --causal --gpu H200 --cp 8 --link nvlink  # context parallelism",
    )
    sub.add_argument("shapes", nargs="+", type=_shape, metavar="B,H,S,D", help="batch, heads, length and head dim of q")
    sub.add_argument("--kv-heads", type=_positive, metavar="N", help="K/V heads (default: H; with one cache 1)")
    sub.add_argument("--seqlen-k", type=_positive, metavar="N", help="number of keys (default: S)")
    sub.add_argument(
        "--value-dim",
        type=_positive,
        metavar="N",
        help="head dim of v (default: D); with --cache-len, one cache whose first N columns are the values (MLA)",
    )
    sub.add_argument(
        "--cache-len", type=_positive, metavar="N", help="explain attn_decode: N keys of each sequence in a K/V cache"
    )
    sub.add_argument("--page-size", type=_positive, metavar="N", help="of a paged cache (default: contiguous)")
    sub.add_argument("--cache-dtype", choices=CACHE_DTYPES, help="dtype of the cache (default: that of q)")
    sub.add_argument("--num-splits", type=_positive, metavar="N", help="splits of the keys (default: automatic)")
    sub.add_argument("--cp", type=_positive, metavar="N", help="explain context parallelism: a sequence on N GPUs")
    sub.add_argument("--link", choices=LINKS, help="link between the GPUs of --cp (default: nvlink)")
    _add_mask(sub)
    sub.add_argument(
        "--gpu",
        metavar="NAME",
        help="A100, A10, L40S, H100, H200, RTX 5090, RTX PRO 6000, GB10, sm_xx (default: the GPU here, else A100)",
    )
    form = sub.add_mutually_exclusive_group()
    form.add_argument("--short", action="store_true", help="print the main lines only")
    form.add_argument("--legend", action="store_true", help="also print what the lines mean")
    form.add_argument("--json", action="store_true", help="print a JSON list with one entry per shape")

    for name, study in studies.STUDIES.items():
        sub = add(name, _study, study.text, *study.examples)
        if name in argv[:1]:
            module = studies.load(study.module, name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)

    sub = add(
        "inspect",
        _inspect,
        "compile a forward kernel and show its registers, spills and instructions; needs no GPU",
        "--head-dim 128 --arch sm_80",
        "--head-dim 64 --causal --arch sm_90 --sass fwd.sass",
    )
    sub.add_argument("--head-dim", type=_positive, default=128, metavar="D", help="head dim (default: %(default)s)")
    _add_mask(sub)
    sub.add_argument(
        "--seqlen-k", type=_positive, metavar="N", help="number of keys; short sequences may use another tile"
    )
    sub.add_argument("--arch", metavar="sm_xx", help="architecture (default: the GPU here, else sm_80)")
    sub.add_argument("--sass", type=Path, metavar="FILE", help="write the disassembly to FILE")
    sub.add_argument("--ptx", type=Path, metavar="FILE", help="write the PTX to FILE")

    sub = add(
        "precompile",
        _precompile,
        "compile kernels into the cache, for an image or a cluster; needs no GPU",
        "--arch sm_90 --jobs 2",
        "--arch sm_80 --head-dims 128 --dtypes bf16 --masks causal --passes forward",
        "--arch sm_90 --features plain,softcap,alibi+dropout --batches dense,varlen",
    )
    sub.add_argument("--arch", metavar="sm_xx", help="architecture (default: the GPU here)")
    for name, parse, default, text in (
        ("--head-dims", _head_dims, "64,128", "192/128 is 192 for q and k, and 128 for v"),
        ("--dtypes", _list_of(DTYPES), "bf16,fp16", ""),
        (
            "--masks",
            _list_of(MASKS),
            "full,causal,window",
            "of full, causal, window (a left and a right bound), left (a left bound alone) and chunk",
        ),
        ("--passes", _list_of(PASSES), "forward,backward", "forward is enough for inference"),
        (
            "--features",
            _feature_sets,
            "plain",
            f"of plain, {', '.join(FEATURES)}; + joins the features of one call, as in alibi+dropout. "
            "The first call with a bias, a score_mod or a mask_mod compiles its own kernel",
        ),
        ("--batches", _list_of(BATCHES), "dense", "of dense (attn) and varlen (attn_varlen, attn_nested)"),
    ):
        sub.add_argument(name, type=parse, default=default, metavar="LIST", help=f"{text} (default: %(default)s)")
    sub.add_argument("--deterministic", action="store_true", help="also compile the kernels of deterministic gradients")
    sub.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="processes, about 1 GB each (default: %(default)s)"
    )

    sub = add(
        "pack",
        _pack,
        "build a wheel of compiled kernels, so that its users need not compile them; needs no GPU",
        "--arch sm_80,sm_90 --jobs 2",
        "--arch sm_90 --out dist --work build/pack  # resumes an interrupted build",
    )
    sub.add_argument(
        "--arch",
        type=_names,
        metavar="LIST",
        help="architectures, such as sm_80,sm_90 (default: those of this host CPU)",
    )
    sub.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheel (default: %(default)s)")
    sub.add_argument(
        "--work", type=Path, default=Path("build/pack"), help="folder of compiled objects (default: %(default)s)"
    )
    sub.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="processes, about 1 GB each (default: %(default)s)"
    )

    sub = add("cache", _cache, "show where kernels come from, or empty the cache", "", "--clear")
    sub.add_argument("--clear", action="store_true", help="delete all kernels in the cache")
    return parser


def _arch(name: str | None) -> ArchSpec | None:
    """The architecture `name`, else that of CUTE_FLASH_ARCH, else that of the first GPU, else None."""
    from cute_flash.spec import arch

    if name is not None:
        return arch.by_name(name)
    return arch.override() or (arch.detect(0) if arch.has_gpu() else None)


def _demo(args: argparse.Namespace) -> int:
    from cute_flash.tools import demo

    return demo.demo()


def _doctor(args: argparse.Namespace) -> int:
    from cute_flash.tools import doctor

    checks = doctor.examine()
    print(json.dumps(doctor.as_dict(checks), indent=2) if args.json else "\n".join(doctor.lines(checks)))
    return 0 if doctor.is_sound(checks) else 1


def _selftest(args: argparse.Namespace) -> int:
    from cute_flash.jit.toolchain import check_installed
    from cute_flash.spec import arch

    if not arch.has_gpu():
        raise UsageError(
            "selftest: torch sees no CUDA GPU; `cute-flash demo` and `cute-flash doctor` also run on a CPU"
        )
    check_installed()
    from cute_flash.spec.family import use_kernels
    from cute_flash.tools.selftest import CELLS, planned_runs, selftest

    with _usage_errors():
        runs = planned_runs(arch.detect(0), args.family)
    # The benchmark too runs the kernels of the family.
    with use_kernels(args.family):
        return selftest(runs, args.json, () if args.no_bench else CELLS)


def _explain(args: argparse.Namespace) -> int:
    from cute_flash.spec.arch import SM_80
    from cute_flash.spec.band import Band
    from cute_flash.spec.problem import Problem
    from cute_flash.tools.explain import explain
    from cute_flash.tools.explain_decode import DecodeExplanation, DecodeShape
    from cute_flash.tools.text import legend, shortened

    explanations: list[Any] = []
    with _usage_errors():
        _check_cache_options(args)
        _check_cp_options(args)
        spec = _arch(args.gpu) or SM_80
        # attn_decode is causal by default.
        band = Band.of(args.causal or args.cache_len is not None, args.window, args.attention_chunk)
        for batch, heads, length, head_dim in args.shapes:
            value_dim = None if args.value_dim == head_dim else args.value_dim
            keys = args.cache_len or args.seqlen_k or length
            is_latent = args.cache_len is not None and args.value_dim is not None
            sizes = (batch, heads, args.kv_heads or (1 if is_latent else heads), length, keys, head_dim)
            if args.cache_len is None:
                problem = Problem(*sizes, DTYPES[args.dtype], band, value_dim)
                if args.cp is None:
                    explanations.append(explain(problem, spec))
                else:
                    cp = studies.load("explain_cp", "explain --cp").ContextParallelExplanation
                    explanations.append(cp.of(problem, args.cp, args.link or LINKS[0], spec))
            else:
                cache = CACHE_DTYPES[args.cache_dtype or "same"], args.page_size
                options = (DTYPES[args.dtype], *cache, band, args.num_splits)
                shape = DecodeShape(*sizes, value_dim, *options, is_latent=is_latent)
                explanations.append(DecodeExplanation.of(shape, spec))
    if args.json:
        print(json.dumps([explanation.as_dict() for explanation in explanations], indent=2))
    else:
        parts = [explanation.lines() for explanation in explanations]
        if args.legend:
            parts.append(legend([line for part in parts for line in part]))
        print("\n\n".join("\n".join(shortened(part) if args.short else part) for part in parts))
    return 0


def _check_cp_options(args: argparse.Namespace) -> None:
    if args.link is not None and args.cp is None:
        raise UsageError("--link without --cp: it is the link between the GPUs of context parallelism; add --cp N")
    if args.cp is not None and (args.short or args.legend):
        raise UsageError("--short and --legend with --cp: its table is short and has a legend; leave them out")
    for name in ("cache_len", "seqlen_k"):
        if args.cp is not None and getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} with --cp: queries and keys are one sequence; leave it out")
    if args.cp is not None and args.attention_chunk is not None:
        raise UsageError("--attention-chunk with --cp: context parallelism does not support chunks; leave it out")


def _check_cache_options(args: argparse.Namespace) -> None:
    if args.cache_len is not None and args.seqlen_k is not None:
        raise UsageError("--seqlen-k with --cache-len: both are the number of keys; leave out --seqlen-k")
    for name in ("page_size", "cache_dtype", "num_splits"):
        if args.cache_len is None and getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} without --cache-len: for attn_decode only; add --cache-len N")


def _study(args: argparse.Namespace) -> int:
    with _usage_errors():
        return args.run(args)


def _inspect(args: argparse.Namespace) -> int:
    from cute_flash.jit import resources
    from cute_flash.jit.toolchain import check_installed
    from cute_flash.planning.plan import plan_forward
    from cute_flash.spec.arch import SM_80
    from cute_flash.spec.band import Band
    from cute_flash.spec.family import requested_family
    from cute_flash.spec.problem import Problem
    from cute_flash.tools.precompile import LENGTH
    from cute_flash.tools.progress import step
    from cute_flash.tools.text import aligned

    check_installed()
    if args.sass and resources.nvdisasm() is None:
        raise UsageError("--sass: no disassembler found; pip install nvidia-cuda-nvdisasm")
    with _usage_errors():
        sizes = (1, 1, 1, LENGTH, args.seqlen_k or LENGTH, args.head_dim)
        problem = Problem(*sizes, DTYPES[args.dtype], Band.of(args.causal, args.window, args.attention_chunk))
        key = plan_forward(problem, _arch(args.arch) or SM_80, requested_family()).main
    with step(f"compiling {key.kernel} for {key.target}"):
        used = resources.kernel_resources(key)
    lines = [f"kernel {key.kernel}", f"tile {key.tile_text}", *used.lines()]
    if used.serialised_wgmma:
        lines.append(f"ptxas serialised wgmma or ignored setmaxnreg: {', '.join(used.serialised_wgmma)}")
    print("\n".join(aligned(lines)))
    if args.sass:
        args.sass.write_text(resources.disassemble(used.cubin))
    if args.ptx:
        args.ptx.write_text(used.ptx)
    for path in filter(None, (args.sass, args.ptx)):
        print(f"wrote {path}")
    return 1 if used.spill_bytes or used.serialised_wgmma else 0


def _precompile(args: argparse.Namespace) -> int:
    from cute_flash.jit.disk import DiskCache
    from cute_flash.jit.toolchain import check_installed
    from cute_flash.tools.precompile import KernelSet, precompile_keys

    check_installed()
    with _usage_errors():
        spec = _arch(args.arch)
        if spec is None:
            raise UsageError("no GPU here: name an architecture, such as --arch sm_80")
        # All plans come first, so that an unsupported head dim is an error before anything is compiled.
        keys = KernelSet(
            head_dims=tuple(args.head_dims),
            dtypes=tuple(DTYPES[name] for name in args.dtypes),
            masks=tuple(args.masks),
            passes=tuple(args.passes),
            features=tuple(args.features),
            batches=tuple(args.batches),
            deterministic=(False, True) if args.deterministic else (False,),
        ).keys(spec)
    cache = DiskCache.default()
    if not cache.is_persistent:
        print("cute-flash: the cache folder cannot be used; see `cute-flash doctor`", file=sys.stderr)
        return 1
    targets = ", ".join(sorted({key.target for key in keys}))
    print(f"{len(keys)} kernel(s) for {targets}, {args.jobs} at a time", file=sys.stderr)
    num_compiled = precompile_keys(keys, args.jobs)
    print(f"{cache.folder}: {num_compiled} kernel(s) compiled, {len(keys) - num_compiled} already there")
    return 0


def _pack(args: argparse.Namespace) -> int:
    from cute_flash.jit.disk import DiskCache
    from cute_flash.jit.toolchain import check_installed
    from cute_flash.spec import arch
    from cute_flash.tools.pack import build_pack
    from cute_flash.tools.pack_table import host_archs, pack_keys

    check_installed()
    with _usage_errors():
        keys = [key for name in args.arch or host_archs() for key in pack_keys(arch.by_name(name))]
    work = DiskCache.at(str(args.work))
    if not work.is_persistent:
        print(f"cute-flash: {args.work} must be a folder that only you can write to (chmod go-w)", file=sys.stderr)
        return 1
    wheel = build_pack(keys, work, args.out, args.jobs)
    print(f"wrote {wheel}: {len(keys)} kernel(s), {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


def _cache(args: argparse.Namespace) -> int:
    from cute_flash.jit import pack
    from cute_flash.jit.disk import DiskCache

    cache = DiskCache.default()
    print(f"{cache.folder}: {cache.contents()}{' deleted' if args.clear else ''}")
    if args.clear:
        cache.clear()
        return 0
    found = pack.installed_pack()
    if found is None:
        print("no pack of kernels is installed")
    elif found.difference:
        print(f"{found.name}: not used, because it was built with {found.difference}")
    else:
        print(f"{found.name}: {found.contents()}")
    print("other kernels are compiled by the first call that needs them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
