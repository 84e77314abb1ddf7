// The visible pairs of a mask, and its block mask.
//
// The definitions are those of `cute_flash.masks` and `cute_flash.BlockMask`; tests/docs/test_playground.py compares
// every number. Each query of these masks sees one run of keys, so no pair is evaluated on its own.
"use strict";

(() => {
  const EMPTY = 0;
  const PARTIAL = 1;
  const FULL = 2;
  const MAX_BLOCKS = 1 << 20;

  /** The window with causal applied: causal is a right side of 0. null is unbounded. */
  const windowOf = (settings) => [settings.left, settings.mask === "causal" ? 0 : settings.right];

  /** The first position of each document, and the end of the last one. */
  function offsetsOf(lengths) {
    const offsets = [0];
    for (const length of lengths) offsets.push(offsets[offsets.length - 1] + length);
    return offsets;
  }

  /** A function that gives the keys [begin, end) that a query sees; begin = end if it sees none. */
  function visibleKeys(settings) {
    const { sq, sk, mask, prefix, documents } = settings;
    const [left, right] = windowOf(settings);
    const offsets = offsetsOf(documents);
    return (query) => {
      // The window is aligned to the bottom right: the last query is at the position of the last key.
      const position = query + sk - sq;
      let begin = left === null ? 0 : Math.max(0, position - left);
      let end = right === null ? sk : Math.min(sk, position + right + 1);
      // Prefix and documents count positions from the start.
      if (mask === "prefix") end = Math.min(end, Math.max(query + 1, prefix));
      if (documents.length) {
        const next = offsets.findIndex((offset) => offset > query);
        // Positions past the last document form another one.
        begin = Math.max(begin, next < 0 ? offsets[offsets.length - 1] : offsets[next - 1]);
        end = Math.min(end, next < 0 ? sk : offsets[next]);
      }
      return begin < end ? [begin, end] : [0, 0];
    };
  }

  /** EMPTY, PARTIAL or FULL for each K/V block of a query block, whose queries see `runs` of keys. */
  function statusOf(runs, numBlocks, tileN) {
    return Array.from({ length: numBlocks }, (_, block) => {
      const [first, last] = [block * tileN, (block + 1) * tileN];
      if (!runs.some(([begin, end]) => begin < last && end > first)) return EMPTY;
      // Runs end at sk, so a block with fewer than tile_n keys is never full.
      return runs.every(([begin, end]) => begin <= first && end >= last) ? FULL : PARTIAL;
    });
  }

  /**
   * All numbers of the panel.
   *
   * settings: sq, sk; mask ("full", "causal", "prefix"); prefix (its length); left, right (of the window, null:
   * unbounded); documents (lengths, [] for none); tileM, tileN.
   *
   * Returns {error} or {status, blocks, empty, partial, full, density, saved, visible, pairs}.
   */
  function analyze(settings) {
    const { sq, sk, tileM, tileN } = settings;
    const [down, across] = [Math.ceil(sq / tileM), Math.ceil(sk / tileN)];
    const blocks = down * across;
    if (blocks > MAX_BLOCKS) {
      return { error: `${blocks.toLocaleString("en")} blocks are too many to draw. Choose larger blocks.` };
    }
    const keysOf = visibleKeys(settings);
    let visible = 0;
    const counts = [0, 0, 0];
    const status = [];
    for (let m = 0; m < down; m++) {
      const runs = [];
      for (let query = m * tileM; query < Math.min(sq, (m + 1) * tileM); query++) {
        const [begin, end] = keysOf(query);
        visible += end - begin;
        runs.push([begin, end]);
      }
      const row = statusOf(runs, across, tileN);
      for (const kind of row) counts[kind]++;
      status.push(row);
    }
    const density = (blocks - counts[EMPTY]) / Math.max(1, blocks);
    return {
      status, blocks, empty: counts[EMPTY], partial: counts[PARTIAL], full: counts[FULL],
      density, saved: 1 - density, visible, pairs: sq * sk,
    };
  }

  /** The same block mask in Python; it defines `block_mask`. */
  function pythonOf(settings) {
    const { sq, sk, mask, prefix, left, right, documents, tileM, tileN } = settings;
    const parts = [];
    if (documents.length) parts.push(`masks.document(offsets=torch.tensor([${offsetsOf(documents).join(", ")}]))`);
    if (mask === "prefix") parts.push(`masks.prefix_lm(${prefix})`);
    const mod = parts.length > 1 ? `masks.and_(${parts.join(", ")})` : parts[0] || "None";
    const side = (value) => (value === null ? "None" : value);
    const bounds = [
      `tile=(${tileM}, ${tileN})`,
      ...(mask === "causal" ? ["causal=True"] : []),
      ...(left === null && right === null ? [] : [`window=(${side(left)}, ${side(right)})`]),
    ];
    return [
      ...(documents.length ? ["import torch", ""] : []),
      `from cute_flash import BlockMask${parts.length ? ", masks" : ""}`,
      "",
      ...(parts.length ? [`mask_mod = ${mod}`] : []),
      `block_mask = BlockMask.of(${parts.length ? "mask_mod" : "None"}, (1, 1, ${sq}, ${sk}), ${bounds.join(", ")})`,
      "print(block_mask.density)",
    ].join("\n");
  }

  window.playgroundMasks = { EMPTY, PARTIAL, FULL, analyze, pythonOf, visibleKeys };
})();
