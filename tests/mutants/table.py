"""The mutants, by area. Each changes results, launches or errors that a user can see."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """`old`, which occurs once in the Python files of `where`, becomes `new`; then one of `tests` must fail."""

    where: str  # a file, or a folder, so that a mutant survives the move of a function
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest

    @property
    def name(self) -> str:
        return f"{self.where}: {' '.join(self.old.split())}"

    def file(self, root: Path = ROOT) -> Path:
        """The file that has the text; ValueError unless it is exactly one file, and has it once."""
        path = root / self.where
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        counts = {file: file.read_text(encoding="utf-8").count(self.old) for file in files}
        holders = [file for file, count in counts.items() if count]
        if sum(counts.values()) != 1:
            raise ValueError(
                f"{self.name}: occurs {sum(counts.values())} times in {len(holders)} files: choose another"
            )
        return holders[0]


def _of(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/{test}" for test in tests)


def _mutants(where: str, tests: tuple[str, ...], *changes: tuple[str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(where, old, new, tests) for old, new in changes)


_BAND = _of("spec/test_band.py")
_DEVICE_SCORES = _of("device/test_score.py::test_scores", "device/test_score.py::test_scores_less_a_reference")
_DEVICE_MASK = _of("device/test_parts.py::test_mask_is_the_band", "device/test_band.py")
_SCORE_BWD = _of("device/test_score_bwd.py")
_REFERENCE = _of("reference/test_features.py", "reference/test_dense.py")
_FORWARD, _BACKWARD = _of("planning/test_forward.py"), _of("planning/test_backward.py")
_DECISIONS = _of("planning/test_decisions.py")
_OPERANDS = _of("runtime/test_dense.py")
_LATENT = _of("planning/test_latent.py")
_DECODE = _of("decode/test_reference.py")
_SHARDS = _of("distributed/test_calls.py", "distributed/test_accumulate.py", "distributed/test_large_groups.py")
_FLASH = _of("integrations/test_flash_attn.py", "integrations/test_flash_attn_3.py")
_LAYOUTS = _of("layouts/test_swizzle.py", "layouts/test_banks.py", "layouts/test_smem.py")

MUTANTS: tuple[Mutant, ...] = (
    # GPUs.
    *_mutants(
        "cute_flash/spec/arch.py",
        _of("spec/test_arch.py"),
        ("self.capability == (9, 0)", "self.capability >= (9, 0)"),
        ('"a" * (self.capability >= (12, 0))', '"a" * (self.capability > (12, 0))'),
        ("spec.name == name and spec.gpu in properties.name", "spec.gpu in properties.name"),
    ),
    Mutant("cute_flash/runtime/gpu.py", "if not arch.was_run:", "if arch.was_run:", _of("runtime/test_gpu.py")),
    *_mutants(
        "cute_flash/api.py",
        _of("runtime/test_supports.py"),
        ('"cuda" if named is not None or q.is_cuda', '"cuda" if q.is_cuda'),
        ('device == "cuda" and not problem.is_empty', 'device == "cuda"'),
        ("named or current_gpu()", "current_gpu()"),
    ),
    Mutant("cute_flash/runtime/decode.py", "gpu or current_gpu()", "current_gpu()", _of("runtime/test_supports.py")),
    # The band.
    *_mutants(
        "cute_flash/spec/band.py",
        _BAND,
        ("(0, i + sk - sq - self.left)", "(0, i + sk - sq - self.left + 1)"),
        ("(sk, i + sk - sq + self.right + 1)", "(sk, i + sk - sq + self.right)"),
        ("i if self.rows_are_keys else position + first", "position + first"),
        ("else position + first", "else position"),
        ("sq, sk, first) + self.chunk)", "sq, sk, first) + self.chunk - 1)"),
        ("self.right if self.chunk is None else 0", "self.right"),
        ("self.chunk <= NARROW", "self.chunk > NARROW"),
        ("self.minimum(first + tile_m, sq) - 1", "first + tile_m - 1"),
        ("ceil_div(self.hi(last, sq, sk), tile_n)", "self.hi(last, sq, sk) // tile_n"),
        ("ceil_div(self.lo(last, sq, sk), tile_n)", "self.lo(last, sq, sk) // tile_n"),
        ("self.hi(first, sq, sk) // tile_n, end", "ceil_div(self.hi(first, sq, sk), tile_n), end"),
        ("block >= self.full_end", "block > self.full_end"),
    ),
    Mutant("cute_flash/spec/band.py", "0 if causal else right", "right", _of("spec/test_band.py", "test_api.py")),
    *_mutants(
        "cute_flash/device/scores",
        _DEVICE_MASK,
        ("is_masked = offset >= hi", "is_masked = offset > hi"),
        ("return c % 2 + c // 2 * 8", "return c % 2 + c // 2 * 4"),
        ("maximum(last + sk - sq, 0) // tile_n", "maximum(last, 0) // tile_n"),
    ),
    # Scores in kernels.
    *_mutants(
        "cute_flash/device/scores",
        _DEVICE_SCORES,
        ("score = score - slope * cute.math.absf", "score = score + slope * cute.math.absf"),
        ("(x * cap - cap) * y", "(x * cap + cap) * y"),
        ("inverse_ab, inverse_cd = inverse * cd, inverse * ab", "inverse_ab, inverse_cd = inverse * ab, inverse * cd"),
        ("acc[i] * (c0 + squared * (c1 + squared * c2))", "acc[i] * (c0 + squared * (c1 - squared * c2))"),
        ("(total <= self.near)", "(total >= self.near)"),
    ),
    # Gradients of scores in kernels.
    *_mutants(
        "cute_flash/device/gradients/score_bwd.py",
        _SCORE_BWD,
        ("(dP - self.of_query(block.rDelta, r, c))", "(dP + self.of_query(block.rDelta, r, c))"),
        ("self.dropout_bits.select(dP, r, c) * self.dropout_scale", "self.dropout_bits.select(dP, r, c)"),
        ("dalibi[0] - dS * opaque.distance(r, c)", "dalibi[0] + dS * opaque.distance(r, c)"),
        ("P * tanh_derivative(x) if self.has_softcap else P", "P"),
    ),
    # Scores of the CPU path.
    *_mutants(
        "cute_flash/reference/score.py",
        _REFERENCE,
        ("torch.tanh(S / features.softcap)", "torch.tanh(S)"),
        ("self.by_head(S) - features.slopes * self.distance", "self.by_head(S) + features.slopes * self.distance"),
        ("dS * (1 - self.tanh.square())", "dS * (1 - self.tanh)"),
        ("return -((self.sinks - lse).exp() * delta)", "return ((self.sinks - lse).exp() * delta)"),
        ("mul_(features.dropout.scale)", "clone()"),
        ("return m, torch.ones_like(m)", "return m, torch.zeros_like(m)"),
    ),
    *_mutants(
        "cute_flash/reference/formulas.py",
        _of("reference/test_dense.py", "reference/test_cpu.py", "layouts/test_loops.py"),
        ("mask &= distance >= -band.left", "mask &= distance > -band.left"),
        ("mask &= distance <= band.right", "mask &= distance < band.right"),
        ("alpha * l + P.sum(dim=-1, keepdim=True)", "l + P.sum(dim=-1, keepdim=True)"),
    ),
    *_mutants(
        "cute_flash/reference/user_mods.py",
        _of("score_mod/test_attention.py"),
        ("partial if mask is None else partial & mask", "partial"),
        ("return after.expand_as(S).clone(), S", "return after.expand_as(S).clone(), after.expand_as(S)"),
        ("total += dS.flatten(1, 2)", "total -= dS.flatten(1, 2)"),
        ("accumulate=True", "accumulate=False"),
        ("x.narrow(dim, part.start, len(part))", "x.narrow(dim, 0, len(part))"),
    ),
    *_mutants(
        "cute_flash/score_mod",
        _of("score_mod/test_captures.py", "score_mod/test_block_mask.py"),
        ("        if reads_state(value):\n", "        if False:\n"),
        ("if self.distinct and len(", "if not self.distinct and len("),
        ("self.aliases.append((first, source))\n                self.proxies[path]", "self.proxies[path]"),
        ("before[key] is not now[key]", "False"),
        ("_version(x) if version is None else version", "_version(x)"),
    ),
    Mutant(
        "cute_flash/reference/merge.py",
        "finite = stacked.masked_fill(empty, 0.0)",
        "finite = stacked",
        _of("reference/test_merge.py"),
    ),
    *_mutants(
        "cute_flash/reference/tiled.py",
        _of("reference/test_cpu.py"),
        ("delta.masked_fill_(empty, 0.0)", "pass"),
        ("tile.load(dO, dtype).masked_fill(empty, 0.0)", "tile.load(dO, dtype)"),
    ),
    # Planning.
    *_mutants(
        "cute_flash/planning/plan.py",
        (*_DECISIONS, *_FORWARD, *_BACKWARD, *_of("runtime/test_dense.py", "runtime/test_varlen.py")),
        ("ceil_div(group * rows, tile_m) < group", "ceil_div(group * rows, tile_m) <= group"),
        ("min(num_tiles, arch.num_sms // ctas_per_tile) * ctas_per_tile", "num_tiles * ctas_per_tile"),
        ("if kv_heads % n == 0)", "if n)"),
        ("is_zeroed = deterministic and", "is_zeroed = not deterministic and"),
        ("static.is_bounded or static.varlen or static.block_sparse", "static.is_bounded or static.block_sparse"),
        ("varlen.DESCENDING if deterministic", "varlen.ASCENDING if deterministic"),
        ('"zeros" if problem.varlen else "empty"', '"empty"'),
    ),
    *_mutants(
        "cute_flash/planning/tiles/__init__.py",
        _of("planning"),
        ("row.serves(static) and row.fits(arch)", "row.serves(static)"),
        ("return SM80_BWD_FP32[arch.name] if", "return SM80_BWD[arch.name] if"),
        ('"dropout" not in features', '"dropout" in features'),
        ("SM90_BWD_SCORE if cost else SM90_BWD", "SM90_BWD"),
    ),
    *_mutants(
        "cute_flash/planning/varlen.py",
        _of("planning/test_decisions.py", "kernels/test_varlen_scheduler.py", "runtime/test_varlen.py"),
        ("(2 if has_unused else 1) * batch + 1", "batch + 1"),
        ("return begin // tile_rows + sequence", "return begin // tile_rows"),
        ("visited.end - visited.begin", "visited.end"),
    ),
    *_mutants(
        "cute_flash/planning/decode.py",
        _of("planning/test_decisions.py", "runtime/test_decode.py"),
        ("ceil_div(tokens * group, tile.tile_m) + batch", "ceil_div(tokens * group, tile.tile_m)"),
        ("rows <= MAX_SPLIT_ROWS and keys >= MIN_SPLIT_KEYS", "keys >= MIN_SPLIT_KEYS"),
    ),
    Mutant(
        "cute_flash/planning/decode_tiles.py",
        "32 if rows > 16 and head_dim <= 128 else 16",
        "32 if rows > 16 else 16",
        _of("planning/test_decisions.py"),
    ),
    # Latent caches: head groups, tiles, and the calls that use wgmma.
    *_mutants(
        "cute_flash/planning/decode_tiles.py",
        _LATENT,
        ("if group % n == 0 and n * tokens <= tile_m", "if n * tokens <= tile_m"),
        ("if 2 * heads * tokens >= tile_m", "if 2 * heads * tokens > tile_m"),
        ("tile_m = 32 if rows > 16 else 16", "tile_m = 32 if rows >= 16 else 16"),
        ("values = 256 if static.width_v <= 256 else 512", "values = 512"),
        ("head_dim = max(ceil_div(static.head_dim, 64) * 64, values)", "head_dim = ceil_div(static.head_dim, 64) * 64"),
        ("if static.is_fp8 and not static.has_query_tables and", "if static.is_fp8 and"),
        ("if tile.holds_queries and", "if"),
        ("for stages in (5, 4, 3, 2)", "for stages in (2, 3, 4, 5)"),
    ),
    *_mutants(
        "cute_flash/planning/latent_sm90.py",
        _LATENT,
        ("and rows > MAX_ROWS_MMA_SYNC", "and rows >= MAX_ROWS_MMA_SYNC"),
        ('and family != "sm80"', ""),
        ("and static.cache_bytes == 2", ""),
        ("return arch.has_wgmma and", "return"),
        ("values = 256 if static.width_v <= 256 else 512", "values = 512"),
        ("min(LatentTileSm90.q_in_registers, head_dim // Q_COLUMNS - 1)", "LatentTileSm90.q_in_registers"),
        ("deeper if deeper.smem_bytes <= arch.smem_per_cta else tile", "deeper"),
    ),
    *_mutants(
        "cute_flash/planning/decode.py",
        _LATENT,
        ("rows, target = group * tokens_of_sequence, arch.target", "rows, target = group, arch.target"),
        ("heads_kv * head_groups, group // head_groups", "heads_kv, group // head_groups"),
        ("batch, tokens = batch * tokens, 1", "batch, tokens = batch, 1"),
        ("Band() if problem.has_query_tables else problem.band", "problem.band"),
        ("if kernel == LATENT_SM90 and heads_at_once % 2 == 0", "if kernel == LATENT_SM90"),
        (" and head_groups % 2 == 0", ""),
        ("multicasts=loads_by_tma(static)", "multicasts=True"),
    ),
    *_mutants(
        "cute_flash/tools/explain_decode.py",
        _of("tools/test_explain_decode.py"),
        ("self.head_dim if self.is_latent else self.head_dim + self.width_v", "self.head_dim + self.width_v"),
        ("return groups * ceil_div(", "return ceil_div("),
    ),
    *_mutants(
        "cute_flash/kernels/common/varlen_scheduler.py",
        _of("kernels/test_varlen_scheduler.py"),
        ("found |= self.mCuSeqlensK[b + 1] < self.mCuSeqlensK[b]", "pass"),
        ("batch.total_q if is_ordered else 0", "batch.total_q"),
    ),
    # The checked mode.
    *_mutants(
        "cute_flash",
        _of("spec/test_checked.py"),
        ("sequences(q, k, on_host(args))", "pass"),
        ("read_sequences(q, k_cache, on_host(args))", "pass"),
        ("for functions in CudaFunctions.all:", "for functions in []:"),
    ),
    # Operands.
    *_mutants(
        "cute_flash/spec/features.py",
        _OPERANDS,
        ("return threshold(args.dropout) * 0x10001", "return threshold(args.dropout)"),
        ("return 1 / (1 - args.dropout)", "return 1 - args.dropout"),
        ("max(args.softcap, MIN_SOFTCAP, MIN_SOFTCAP * scale)", "args.softcap"),
        ("if FEATURE[name].bwd])", "if FEATURE[name].fwd])"),
    ),
    # Launches.
    *_mutants(
        "cute_flash/runtime/counters.py",
        _of("runtime/test_counters.py"),
        ("if cached is not None and not is_capturing:", "if cached is not None:"),
        ("if is_capturing or stream == PER_THREAD_STREAM or", "if is_capturing or"),
        ("key = num_launches > 1,", "key = num_launches > 0,"),
        ("offsets.append(end)", "offsets.append(0)"),
        ("if len(_views) >= MAX_VIEWS:", "if len(_views) > MAX_VIEWS:"),
        ("if row < MAX_GRAPHS else", "if row <= MAX_GRAPHS else"),
        ("(device_index, capture, stream), len(_graphs)", "(device_index, capture), len(_graphs)"),
        ("if num <= GRAPH_COUNTERS and device_index in _reserve", "if device_index in _reserve"),
        ("return stream != 0 and torch", "return torch"),
    ),
    *_mutants(
        "cute_flash/runtime/operands.py",
        _OPERANDS,
        ("return (-q if scale < 0 else q), max(abs(scale), MIN_SCALE)", "return q, max(abs(scale), MIN_SCALE)"),
        ("return tensor.stride(1) == tensor.shape[2] * tensor.stride(2)", "return True"),
        ("group * tensor.stride(1), row_stride", "tensor.stride(1), row_stride"),
        ("return row // RECT_ROWS * CALL_STRIDE", "return row // RECT_ROWS"),
    ),
    *_mutants(
        "cute_flash/runtime/launcher.py",
        _OPERANDS,
        ("args.deterministic or is_mode_deterministic()", "args.deterministic"),
        ("all(can_pack_gqa(x) or not has_aligned_strides(x) for x in (q, out))", "True"),
        ("dlse is None, args.key,", "args.key,"),
        ("lse.fill_(-math.inf)", "lse.fill_(0.0)"),
    ),
    *_mutants(
        "cute_flash/ops.py",
        _of("tools/test_warmup.py"),
        ('report(q, "backward", dlse, q, k, v, args)', "pass"),
        ("return recorder is not None and getattr(recorder, call)(*arguments)", "return False"),
    ),
    *_mutants(
        "cute_flash/tools/warmup.py",
        _of("tools/test_warmup.py"),
        ("if decode.only_appends(q, args):", "if False:"),
        ("            x.grad = None", "            pass"),
    ),
    *_mutants(
        "cute_flash/score_mod/tensor_cache.py",
        _of("tools/test_warmup.py"),
        ("if _dispatch_modes():", "if False:"),
    ),
    *_mutants(
        "cute_flash/runtime/binder.py",
        _of("runtime/test_dense.py", "runtime/test_varlen.py", "runtime/test_decode.py", "runtime/test_mods.py"),
        ('self.add("if not MIN_SCALE <=', 'self.add("if not 0 <='),
        ("absent if bound is None else min(bound, operands.MAX_WINDOW)", "absent if bound is None else bound"),
        ("0 if band.chunk is None else operands.MAX_WINDOW", "0"),
        ("farthest if bound is None else min(bound, farthest)", "0 if bound is None else min(bound, farthest)"),
        ("begins_apart = plan.tile.begins_apart and not plan.deterministic", "begins_apart = plan.tile.begins_apart"),
        ('"sinks" in problem.features and plan.main', '"sink" in problem.features and plan.main'),
    ),
    *_mutants(
        "cute_flash/planning/launch.py",
        _of("planning/test_launch.py", "runtime/test_varlen.py"),
        ("for operand in key.parameters if key.takes(operand)}", "for operand in key.parameters}"),
    ),
    *_mutants(
        "cute_flash/planning/plan.py",
        _of("planning/test_launch.py"),
        ("(mods is not None and mods.graphs.present)", "mods is not None"),
        ("(mods is not None and mods.graphs.present):", "False:"),
    ),
    *_mutants(
        "cute_flash/planning/bias.py",
        _of("spec/test_features.py"),
        ("MAPS not in formulas_of(problem.features)", "True"),
    ),
    *_mutants(
        "cute_flash/kernels/sm90/fwd_storage.py",
        _of("spec/test_features.py"),
        ("len(formulas_of(self.static.features)) == 1", "len(formulas_of(self.static.features)) >= 1"),
    ),
    Mutant(
        "cute_flash/spec/args.py", "self.needs_grad[1 + i]", "self.needs_grad[i]", _of("spec/test_args.py")
    ),
    # The disk cache of kernels.
    *_mutants(
        "cute_flash/jit/disk.py",
        _of("jit/test_disk.py", "jit/test_kernels.py"),
        ("hashlib.sha256(path.read_bytes()).hexdigest() == expected else", "expected else"),
        ("stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH"),
        ("status.st_uid != os.getuid()", "status.st_uid == -1"),
        ("fcntl.flock(file, fcntl.LOCK_EX)", "pass"),
        ("DiskCache(Path(private), is_persistent=False)", "DiskCache(Path(private))"),
    ),
    *_mutants(
        "cute_flash/jit/digest.py",
        _of("jit/test_digest.py"),
        ('{"sources": source_digest(), **toolchain()}', "toolchain()"),
        ("for x in fields(key.tile) if x.compare}", "for x in fields(key.tile)}"),
    ),
    Mutant(
        "cute_flash/jit/toolchain.py",
        'removeprefix("cu")) <= major',
        'removeprefix("cu")) < major',
        _of("jit/test_digest.py"),
    ),
    *_mutants(
        "cute_flash/jit/pack.py",
        _of("jit/test_pack.py"),
        ("hashlib.sha256(path.read_bytes()).hexdigest() == expected", "path.exists()"),
        ("if ours[name] != theirs.get(name)", "if ours[name] > theirs.get(name, '')"),
    ),
    # Layouts.
    *_mutants(
        "cute_flash/smem/swizzle.py",
        _LAYOUTS,
        ("(index & self.mask) >> self.shift", "(index & self.mask) >> (self.shift + 1)"),
        ("return 1 << (self.base + self.bits)", "return 1 << self.base"),
    ),
    *_mutants(
        "layouts/banks.py",
        _LAYOUTS,
        ("word // BANK_BYTES % NUM_BANKS", "word // BANK_BYTES % (NUM_BANKS // 2)"),
        ("(row0 + lane // 4, col0 + lane % 4 * 2)", "(row0 + lane // 4, col0 + lane % 4)"),
        ("col0 + lane // _MATRIX % 2 * _MATRIX)", "col0)"),
    ),
    # Sharding.
    *_mutants(
        "cute_flash/distributed",
        _SHARDS,
        ("(shard, 2 * self.num_shards - 1 - shard)", "(shard, 2 * self.num_shards - 2 - shard)"),
        ("min(sharding.chunk, sharding.seqlen - start)", "sharding.chunk"),
        ("left += sk - sq - offset", "left += sk - sq + offset"),
        ("is_aligned=offset == sk - sq", "is_aligned=True"),
        ("nearest <= band.right", "nearest < band.right"),
    ),
    # The CPU path of decode.
    Mutant(
        "cute_flash/reference/decode.py",
        "min(s.first, s.seqlen_before) // page_size",
        "s.first // page_size",
        _of("decode/test_bad_input.py"),
    ),
    *_mutants(
        "cute_flash/reference/decode.py",
        _DECODE,
        ("_fused(a, cos, -b * sin), _fused(b, cos, a * sin)", "_fused(a, cos, b * sin), _fused(b, cos, -a * sin)"),
        ("sizes = 0, num_queries, seqlen - leftpad", "sizes = 0, num_queries, seqlen"),
        ("first = leftpad + args.band.lo", "first = args.band.lo"),
        ("(x, (0, 0, 0, 0, s.rows_of_chunk, 0))", "(x, (0, 0, 0, 0, 0, 0))"),
        ("x / _by_head(scale, x.dtype)", "x * _by_head(scale, x.dtype)"),
        ("torch.arange(s.seqlen - s.num_queries, s.seqlen", "torch.arange(1, s.num_queries + 1"),
        ("to(wide), (s.seqlen_before, s.seqlen)", "to(wide), (0, s.seqlen - s.seqlen_before)"),
        ("V = K[..., : args.value_dim]", "V = K[..., -args.value_dim :]"),
        ("row, j = row[row >= 0], j[row >= 0]", "row, j = row[row > 0], j[row > 0]"),
        ("lse[self.index, :, self.query : self.query + 1]", "lse[self.index, :, :1]"),
    ),
    *_mutants(
        "cute_flash/reference/decode.py",
        _of("decode/test_bad_input.py"),
        ("if not -1 <= page < num_pages:", "if not page < num_pages:"),
        ("pages[: ceil_div(seqlen, page_size)]", "pages[: seqlen // page_size]"),
    ),
    *_mutants(
        "cute_flash/spec/latent.py",
        _of("decode/test_bad_input.py", "decode/test_ops.py"),
        ("not 1 <= args.value_dim <= head_dim_of(k_cache)", "not 1 <= args.value_dim"),
        ("if args.window_right not in (None, 0):", "if False:"),
        ('    "k_new": "append in a call before",\n', ""),
        ("width % HEAD_DIM_STEP or width > most", "width > most"),
    ),
    Mutant("cute_flash/spec/decode.py", "torch.float16 if cache == FP8 and", "q if cache == FP8 and", _DECODE),
    # Rows of bytes.
    *_mutants(
        "cute_flash/reference/ds_mla.py",
        _of("decode/test_ds_mla.py"),
        ("nan_to_num(nan=0.0, posinf=torch.inf)", "nan_to_num(nan=0.0)"),
        (".nan_to_num(nan=0.0, posinf=torch.inf)", ""),
        (".clamp(min=torch.finfo(torch.float32).tiny)", ""),
        ("(groups / scales).clamp(-largest, largest)", "groups / scales"),
        ("rows[..., SCALES_BYTE:ROTARY_BYTE]", "rows[..., SCALES_BYTE:ROTARY_BYTE].flip(-1)"),
        ("latent.to(torch.float16).to(q.dtype)", "latent"),
        ("rotary.to(torch.bfloat16).to(q.dtype)", "rotary"),
    ),
    *_mutants(
        "cute_flash/spec/ds_mla.py",
        _of("decode/test_bad_input.py"),
        ("if v_cache is not None and is_ds_mla(v_cache):", "if False:"),
        ("if size != expected:", "if False:"),
        ("if args.k_scale is not None:", "if False:"),
        ("HEAD_DIM if is_ds_mla(cache) else cache.shape[-1]", "cache.shape[-1]"),
    ),
    *_mutants(
        "cute_flash/score_mod/trace.py",
        _of("score_mod/test_captures.py"),
        ("if refusals.first is not None:", "if False:"),
    ),
    *_mutants(
        "cute_flash/spec/layout.py",
        _of("test_bad_input.py"),
        (" or MAX_USUAL_GQA_HEADS < heads_kv < heads", ""),
    ),
    *_mutants(
        "cute_flash/spec/overlap.py",
        _of("decode/test_bad_input.py"),
        ("return -width_b < distance < width_a", "return distance == 0"),
        ("if stride < extent:", "if stride == 0:"),
        ("args.cache_batch_idx is None else 1", "args.cache_batch_idx is None else 0"),
        ("max(nearest, 1 - size_b), min(farthest, size_a - 1) + 1", "max(nearest, 0), min(farthest, size_a - 1) + 1"),
        ("min(farthest, size_a - 1) + 1", "min(farthest, 0) + 1"),
        ("    if first == 0:\n", "    if True:\n"),
    ),
    # Tools.
    *_mutants(
        "cute_flash/tools/roofline.py",
        _of("tools/test_roofline.py"),
        ("if p.band.right == 0 else every_pair", "if p.band.right is not None else every_pair"),
        ("every_pair // 2 if p.band", "every_pair // 2 if p.band.left is None and p.band"),
    ),
    # Adapters.
    # Keywords that an entry drops in silence.
    *_mutants(
        "cute_flash",
        _of("test_entries.py"),
        ("softcap=softcap, alibi=alibi, sinks=sinks, dropout=dropout,\n", "alibi=alibi, sinks=sinks,\n"),
        ("attention_chunk=attention_chunk, scale=scale, return", "scale=scale, return"),
        ("values.mask_mod, values.score_mod_bwd)", "values.mask_mod, None)"),
        ("        alibi=_local(alibi, first),\n", ""),
        ("dict.fromkeys(names, ((None, False), remedy))", "dict.fromkeys(names, ((None, False, True), remedy))"),
        ('refuse("cute_attention", keywords', 'refuse("cute_attention", {}'),
    ),
    *_mutants(
        "cute_flash/integrations/flash_attn_args.py",
        (*_FLASH, *_of("integrations/test_flash_attn_kvcache.py")),
        ("return bound if bound >= 0 else None", "return bound if bound > 0 else None"),
        ("missing = -x.shape[-1] % HEAD_DIM_STEP", "missing = 0"),
        ("softcap if softcap > 0 else None", "None"),
        ("return 3 if returns_probs else 1", "return 2 if returns_probs else 1"),
    ),
    *_mutants(
        "cute_flash/integrations/flash_attn_tokens.py",
        (*_FLASH, *_of("integrations/test_flash_attn_kvcache.py")),
        ("(starts + moves * torch.arange", "(starts - moves * torch.arange"),
        ("is_unused = index >= pad(lengths", "is_unused = index > pad(lengths"),
        ("seqused_q.minimum(cu_seqlens_q.diff())", "seqused_q"),
        (".where(sequence < offsets.shape[0] - 1, 0)", ""),
        ("not 0 <= used[b] <= end - begin", "not 0 <= used[b]"),
    ),
    *_mutants(
        "cute_flash/integrations/transformers.py",
        _of("integrations/test_transformers.py"),
        ("sliding_window - 1, None", "sliding_window, None"),
        ("mask[b, q_idx] == mask[b, kv_idx]", "mask[b, q_idx] >= mask[b, kv_idx]"),
        ("sinks=s_aux", "sinks=None"),
        ("attention_mask if bias is None else bias + attention_mask", "attention_mask"),
    ),
    Mutant(
        "cute_flash/integrations/flex_attention.py",
        "scale=scale, return_lse=True",
        "return_lse=True",
        _of("integrations/test_flex_attention.py"),
    ),
)  # fmt: skip
