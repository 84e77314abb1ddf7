"""Calls of `profiling decode --mla`: cute_flash and its peers on one latent cache, with exact results.

q is (B, T, H, 576). The cache is (B, S, 1, 576) and full, so that all calls read the same keys. Its first 512 columns
are the values. Pages hold the same rows in random order. Index lists name rows of a larger cache, which has pages of
one row; the contiguous cache beside them holds the rows of the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

import cute_flash
from profiling.peers.flash_attention import fa3_latent, fa3_ops
from profiling.peers.flash_mla import PAGE_SIZE, flash_mla_decode, flash_mla_module
from profiling.peers.peer import missing
from profiling.studies.decode_cases import FP8, FP8_SCALE, Call, exact_rows

HEAD_DIM, VALUE_DIM = 576, 512
# That of DeepSeek's head dim before queries are multiplied into the space of the cache.
SCALE = 192**-0.5
OURS, SM80, CONTIGUOUS, FA3, FLASH_MLA = "cute_flash", "cute_flash-sm80", "contiguous", "fa3", "flash_mla"
PEERS = (FA3, FLASH_MLA)
APPENDED = f"{OURS}, append"
# Parts of the study. Each case of the last three is measured beside the bf16 contiguous cache.
CELLS, TOKENS, PAGES, LISTS, FP8_CACHE = PARTS = ("cells", "tokens", "pages", "lists", "fp8")


@dataclass(frozen=True, kw_only=True)
class Case:
    part: str
    heads: int
    batch: int
    length: int  # keys of a query
    tokens: int = 1
    page_size: int | None = None
    cached: int | None = None  # rows of a sequence from which lists choose

    @property
    def cache(self) -> str:
        """The cache in words."""
        if self.cached is not None:
            return f"lists of {self.length} of {self.cached} rows"
        if self.page_size is not None:
            return "pages of one row" if self.page_size == 1 else f"pages of {self.page_size} rows"
        return "FP8" if self.part == FP8_CACHE else "contiguous"

    @property
    def id(self) -> str:
        tokens = f" T={self.tokens}" * (self.tokens > 1)
        return f"H={self.heads}{tokens} B={self.batch} length {self.length}, {self.cache}"

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * self.tokens * self.length * (HEAD_DIM + VALUE_DIM)

    def cache_bytes(self, name: str) -> int:
        """The bytes of the rows that a call reads, once."""
        is_fp8 = self.part == FP8_CACHE and name == OURS
        return self.batch * self.length * HEAD_DIM * (1 if is_fp8 else 2)


def unavailable() -> dict[str, str]:
    """Peer -> the reason why it cannot run here."""
    reasons = {FA3: missing(fa3_ops), FLASH_MLA: missing(flash_mla_module)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # (B, T, H, 576)
    cache: Tensor  # (B, S, 1, 576)
    lengths: Tensor  # (B), int32
    # (num_pages, page_size, 1, 576) and (B, max_pages), if the case has pages or lists
    pages: Tensor | None
    page_table: Tensor | None

    @staticmethod
    def random(case: Case, device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
        q = normal(case.batch, case.tokens, case.heads, HEAD_DIM)
        lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device=device)
        if case.cached is not None:
            pages = normal(case.batch * case.cached, 1, 1, HEAD_DIM)
            chosen = [
                torch.randperm(case.cached, generator=generator, device=device)[: case.length] + i * case.cached
                for i in range(case.batch)
            ]
            table = torch.stack(chosen)
            return Inputs(q, pages[table].flatten(1, 2), lengths, pages, table.int())
        latent = normal(case.batch, case.length, 1, HEAD_DIM)
        if case.page_size is None:
            return Inputs(q, latent, lengths, None, None)
        num_pages = case.length // case.page_size
        order = torch.randperm(case.batch * num_pages, generator=generator, device=device)
        table = order.view(case.batch, num_pages)
        pages = torch.empty_like(latent).view(-1, case.page_size, 1, HEAD_DIM)
        pages[table] = latent.unflatten(1, (num_pages, case.page_size))
        return Inputs(q, latent, lengths, pages, table.int())


# ---- calls
# -------------------------------------------------------------------------------------------------------


def _contiguous(inputs: Inputs) -> Callable[[], Tensor]:
    return partial(
        cute_flash.attn_decode, inputs.q, inputs.cache, value_dim=VALUE_DIM, cache_seqlens=inputs.lengths, scale=SCALE
    )


def _paged(inputs: Inputs, case: Case) -> Callable[[], Tensor]:
    """With a page table of each sequence, or of each query if the case has lists."""
    table, lengths = inputs.page_table, inputs.lengths
    if case.cached is not None:
        assert table is not None
        table, lengths = table[:, None].contiguous(), lengths[:, None].contiguous()
    return partial(
        cute_flash.attn_decode, inputs.q, inputs.pages, value_dim=VALUE_DIM, cache_seqlens=lengths, page_table=table,
        scale=SCALE,
    )  # fmt: skip


def _fp8(inputs: Inputs) -> Call:
    stored = (inputs.cache / FP8_SCALE).to(FP8)
    scale = torch.tensor(FP8_SCALE, device=inputs.q.device)
    call = partial(
        cute_flash.attn_decode, inputs.q, stored, value_dim=VALUE_DIM, cache_seqlens=inputs.lengths, scale=SCALE,
        k_scale=scale,
    )  # fmt: skip

    def exact(sequence: int, head_kv: int) -> Tensor:
        one = slice(sequence, sequence + 1)
        rows = stored[one].float() * FP8_SCALE
        return exact_rows(inputs.q[one], rows, rows[..., :VALUE_DIM], 0, head_kv, SCALE)

    return Call(call, cache(exact))


def _appending(inputs: Inputs) -> Callable[[], Tensor]:
    """Append the last row of each sequence. All calls write that row again."""
    return partial(
        cute_flash.attn_decode, inputs.q, inputs.cache, value_dim=VALUE_DIM, cache_seqlens=inputs.lengths - 1,
        k_new=inputs.cache[:, -1:].clone(), scale=SCALE,
    )  # fmt: skip


def _fa3(inputs: Inputs, case: Case) -> Callable[[], Tensor]:
    """Without lengths, because the cache is full: with them it would launch one more kernel."""
    memory = inputs.cache if inputs.pages is None else inputs.pages
    return partial(fa3_latent, inputs.q, memory, VALUE_DIM, SCALE, case.tokens > 1, inputs.page_table)


def _flash_mla(inputs: Inputs, case: Case) -> Callable[[], Tensor]:
    """A contiguous cache is seen as pages in order."""
    pages, table = inputs.pages, inputs.page_table
    if pages is None or table is None:
        pages = inputs.cache.view(-1, PAGE_SIZE, 1, HEAD_DIM)
        table = torch.arange(len(pages), dtype=torch.int32, device=pages.device).view(case.batch, -1)
    return flash_mla_decode(inputs.q, pages, table, inputs.lengths, VALUE_DIM, SCALE, case.tokens > 1)


def calls(case: Case, device: torch.device, seed: int) -> dict[str, Call]:
    """The calls of a case by name, cute_flash first. A peer that cannot run the case is left out."""
    inputs = Inputs.random(case, device, seed)
    exact = cache(partial(exact_rows, inputs.q, inputs.cache, inputs.cache[..., :VALUE_DIM], scale=SCALE))
    contiguous = Call(_contiguous(inputs), exact)
    if case.part == FP8_CACHE:
        return {OURS: _fp8(inputs), CONTIGUOUS: contiguous}
    made = {FA3: Call(_fa3(inputs, case), exact)}
    if case.page_size in (None, PAGE_SIZE) and case.cached is None:
        made[FLASH_MLA] = Call(_flash_mla(inputs, case), exact)
    if inputs.pages is not None:
        return {OURS: Call(_paged(inputs, case), exact), CONTIGUOUS: contiguous, **made}
    sm80 = Call(contiguous.call, exact, partial(cute_flash.use_kernels, "sm80"))
    return {OURS: contiguous, SM80: sm80, **made}


def host_calls(case: Case, device: torch.device, seed: int) -> dict[str, Call]:
    """The calls whose host time is measured, by name."""
    inputs = Inputs.random(case, device, seed)
    made = calls(case, device, seed)
    return {**made, APPENDED: Call(_appending(inputs), made[OURS].exact)}
