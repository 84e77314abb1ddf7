"""`cute-flash explain` for decode: the division of keys among CTAs, bytes, time and options."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cute_flash.planning.decode import UNIT_KEYS, SplitSizes, plan_decode, plan_splits
from cute_flash.spec import arch
from cute_flash.spec.band import Band
from cute_flash.spec.decode import DecodeArgs, describe_decode
from cute_flash.spec.family import use_kernels
from cute_flash.tools import explain_decode
from cute_flash.tools.cli import main
from cute_flash.tools.explain_decode import DecodeExplanation, DecodeShape

BASE = DecodeShape(8, 32, 8, 1, 8192, 128)
LATENT = DecodeShape(8, 128, 1, 1, 8192, 576, 512, is_latent=True)
ARGV = "explain 8,32,1,128 --kv-heads 8 --cache-len 8192 --gpu H200".split()


def pieces_of(one: DecodeExplanation) -> list[list[tuple[int, int]]]:
    """The (CTA, keys) pairs of every tile, by a loop over CTAs and units as in `device/scheduling/kv_splits.py`."""
    first = (one.shape.keys - one.visited_keys) // UNIT_KEYS
    num_units = max(-(-one.shape.keys // UNIT_KEYS) - first, 1)
    per_tile = one.shape.num_splits or num_units
    per_cta, numbers = one.division
    tiles: list[list[tuple[int, int]]] = [[] for _ in range(one.num_tiles)]
    num_heads = one.plan.heads_at_once
    for cta in range(one.plan.num_ctas):
        head, interval = divmod(cta, one.plan.num_ctas // num_heads)
        unit, end = interval * per_cta, (interval + 1) * per_cta
        while unit < min(end, one.num_tiles // num_heads * numbers):
            tile = unit // numbers
            stop = min(end, (tile + 1) * numbers)
            begin, last = unit - tile * numbers, min(stop - tile * numbers, per_tile)
            if one.shape.num_splits:
                begin, last = begin * num_units // per_tile, last * num_units // per_tile
            tiles[tile * num_heads + head].append((cta, (last - begin) * UNIT_KEYS))
            unit = stop
    return tiles


@pytest.mark.parametrize("gpu", ["A100", "A10", "H200"])
@pytest.mark.parametrize("base", [BASE, LATENT], ids=["K/V", "latent"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 16},
        {"heads": 40, "tokens": 3},
        {"keys": 1},
        {"batch": 1, "keys": 131_072},
        {"batch": 128, "keys": 4096},
        {"tokens": 8, "keys": 1000},
        {"tokens": 300, "batch": 2},
        {"band": Band(1000, 0)},
        {"num_splits": 3},
        {"num_splits": 7, "keys": 3000},
        {"cache_dtype": explain_decode.FP8, "page_size": 16},
    ],
    ids=str,
)
def test_keys_are_divided_as_by_the_kernel(gpu: str, base: DecodeShape, changes: dict) -> None:
    one = DecodeExplanation.of(replace(base, **changes), arch.by_name(gpu))
    tiles = pieces_of(one)
    counts = [len(tile) for tile in tiles]
    assert one.splits == (min(counts), max(counts))
    assert one.busy_ctas == len({cta for tile in tiles for cta, _ in tile}) <= one.plan.num_ctas
    per_cta: dict[int, int] = {}
    for cta, keys in (pair for tile in tiles for pair in tile):
        per_cta[cta] = per_cta.get(cta, 0) + keys
    assert max(per_cta.values()) <= one.keys_per_cta
    if not one.shape.num_splits and one.busy_ctas > 1:
        assert max(per_cta.values()) == one.keys_per_cta
    visited = {sum(keys for _, keys in tile) for tile in tiles}
    assert len(visited) == 1 and one.visited_keys <= visited.pop() < one.visited_keys + 2 * UNIT_KEYS


def test_bytes_and_time(capsys: pytest.CaptureFixture) -> None:
    assert main([*ARGV, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    kv_bytes = 2 * 8 * 8192 * 8 * 128 * 2
    plan = plan_splits("decode", BASE.static, SplitSizes(8, 1, 32, 8, 8192), arch.H200)
    assert (found["kernel"], found["arch"], found["blocks"]) == ("decode", "sm_90", plan.num_ctas)
    assert found["kv_bytes"] == kv_bytes and found["tile"]["tile_m"] == plan.tile.tile_m
    assert found["least_bytes"] == kv_bytes + 8 * 32 * (2 * 128 * 2 + 4)
    assert found["seconds"] == pytest.approx(found["least_bytes"] / 4.8e12) and found["bound"] == "memory"
    assert main([*ARGV, "--json", "--page-size", "16", "--cache-dtype", "fp8"]) == 0
    (fp8,) = json.loads(capsys.readouterr().out)
    assert fp8["kv_bytes"] == kv_bytes // 2 and fp8["problem"]["page_size"] == 16
    assert main([*ARGV, "--json", "--window", "1023", "none"]) == 0
    (window,) = json.loads(capsys.readouterr().out)
    assert window["kv_bytes"] == kv_bytes // 8
    assert main([*ARGV, "--json", "--attention-chunk", "7168"]) == 0
    (chunk,) = json.loads(capsys.readouterr().out)
    assert chunk["kv_bytes"] == kv_bytes // 8
    # Many tokens: tiles of rows share the keys, and the tensor cores decide.
    assert main("explain 1,32,2048,128 --cache-len 8192 --gpu H200 --json".split()) == 0
    (chunk,) = json.loads(capsys.readouterr().out)
    assert chunk["bound"] == "tensor"


def test_text(capsys: pytest.CaptureFixture) -> None:
    assert main([*ARGV, "--page-size", "16", "--cache-dtype", "fp8", "--num-splits", "3"]) == 0
    out = capsys.readouterr().out
    assert "call        attn_decode\ncache       float8_e4m3fn, pages of 16\n" in out
    assert "192 CTAs, 192 have keys" in out and "3 CTA(s) share the keys" in out
    assert "134.218 MB, read by 1 tile(s) of rows" in out and "at 4.80 TB/s" in out and "by memory" in out


@pytest.mark.parametrize("gpu", ["A100", "A10", "H200"])
@pytest.mark.parametrize(("heads", "tokens"), [(8, 1), (16, 1), (16, 2), (64, 1), (128, 1), (128, 2), (40, 1)])
@pytest.mark.parametrize("cache_dtype", ["", explain_decode.FP8])
def test_the_plan_of_one_cache_is_that_of_the_call(gpu: str, heads: int, tokens: int, cache_dtype: str) -> None:
    spec = arch.by_name(gpu)
    stored = torch.float8_e4m3fn if cache_dtype else torch.bfloat16
    q, cache = torch.empty(4, tokens, heads, 576, dtype=torch.bfloat16), torch.empty(4, 2048, 1, 576, dtype=stored)
    args = DecodeArgs(torch.zeros(4, dtype=torch.int32), 0.07, window_right=0, value_dim=512)
    expected = plan_decode(describe_decode(q, cache, None, args, "cuda"), spec)
    one = DecodeExplanation.of(
        replace(LATENT, batch=4, heads=heads, tokens=tokens, keys=2048, cache_dtype=cache_dtype), spec
    )
    assert (one.plan.key.kernel, one.plan.tile, one.plan.sizes) == (expected.key.kernel, expected.tile, expected.sizes)
    assert one.num_tiles == expected.num_query_tiles


MLA_ARGV = "explain 32,128,1,576 --cache-len 4096 --value-dim 512 --page-size 64 --gpu H200".split()


def test_one_cache_counts_once(capsys: pytest.CaptureFixture) -> None:
    assert main([*MLA_ARGV, "--json"]) == 0
    (many,) = json.loads(capsys.readouterr().out)
    cache = 32 * 4096 * 576 * 2
    assert (many["kernel"], many["head_groups"], many["tiles"]) == ("decode_latent_sm90", 2, 64)
    assert many["kv_bytes"] == cache and many["least_bytes"] == cache + 32 * 128 * (1088 * 2 + 4)
    # Both query tiles read the cache: 2 x (576 + 512) FLOP for each head and key.
    assert many["bound"] == "tensor" and many["seconds"] == pytest.approx(32 * 128 * 4096 * 2 * 1088 / 989e12)
    assert many["workspace_bytes"] == 2 * 132 * 64 * (512 + 2) * 4
    assert many["problem"]["is_latent"] and many["problem"]["heads_kv"] == 1
    assert main(["explain", "32,16,1,576", *MLA_ARGV[2:], "--json"]) == 0
    (few,) = json.loads(capsys.readouterr().out)
    assert (few["kernel"], few["head_groups"], few["bound"]) == ("decode_latent", 1, "memory")
    assert few["seconds"] == pytest.approx((cache + 32 * 16 * (1088 * 2 + 4)) / 4.8e12)
    with use_kernels("sm80"):
        assert main([*MLA_ARGV, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["kernel"] == "decode_latent"
    # Values that are the whole row.
    assert main("explain 1,16,1,512 --cache-len 4096 --value-dim 512 --gpu A100 --json".split()) == 0
    assert json.loads(capsys.readouterr().out)[0]["kv_bytes"] == 4096 * 512 * 2


def test_text_of_one_cache(capsys: pytest.CaptureFixture) -> None:
    assert main(MLA_ARGV) == 0
    out = capsys.readouterr().out
    assert "Hkv=1 Sq=1 Sk=4096 D=576/512" in out
    assert "cache       bfloat16, pages of 64, values: its first 512 columns\n" in out
    assert "64 rows x 64 keys, D 576/512, 4 warpgroups: a producer, scores, two halves of the output, 2 stages" in out
    assert (
        "64 tiles; 2 groups of heads, clusters of 2 CTAs" in out
        and "150.995 MB in one cache, read by 2 tile(s) of rows" in out
    )
    assert main([*MLA_ARGV, "--cache-dtype", "fp8"]) == 0
    assert "8 warps, 8 share 16 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("1,8,1,64 --page-size 16", "--page-size without --cache-len"),
        ("1,8,1,64 --cache-dtype fp8", "--cache-dtype without --cache-len"),
        ("1,8,1,64 --num-splits 2", "--num-splits without --cache-len"),
        ("1,8,1,64 --cache-len 100 --seqlen-k 100", "--seqlen-k with --cache-len"),
        ("1,8,1,72 --cache-len 100 --cache-dtype fp8", "use multiples of 16"),
        ("1,8,1,60 --cache-len 100", "head_dim=60"),
        ("1,8,1,64 --cache-len 100 --dtype fp32", "attn_decode in float32"),
        ("1,8,1,64 --cache-len 100 --kv-heads 3", "8 heads"),
        ("1,8,1,640 --cache-len 100 --value-dim 512", "head_dim=640 with one cache"),
        ("1,8,1,576 --cache-len 100 --value-dim 520", "value_dim=520 with one cache"),
        ("1,8,1,64 --cache-len 100 --value-dim 60", "value_dim=60 with one cache"),
        ("1,8,1,64 --cache-len 100 --value-dim 72", "the values are the first columns"),
        ("1,8,1,72 --cache-len 100 --value-dim 64 --cache-dtype fp8", "head dims 72 on cuda: use multiples of 16"),
    ],
)
def test_options_that_do_not_fit(argv: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", *argv.split(), "--gpu", "A100"]) == 2
    assert message in capsys.readouterr().err
