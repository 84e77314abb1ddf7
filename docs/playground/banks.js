// Bank conflicts of one warp instruction, and of all instructions that cover a tile.
//
// The definitions are those of the Python package `layouts`; tests/docs/test_playground.py compares every number.
// Shared memory has 32 banks of 4 bytes. A warp is served in phases of 128 bytes: 32 threads of 4 bytes, 16 of 8 or 8
// of 16. In a phase each bank delivers one word per wavefront.
"use strict";

(() => {
  const NUM_BANKS = 32;
  const BANK_BYTES = 4;
  const WARP = 32;
  const WAVEFRONT_BYTES = 128;
  const CHUNK_BYTES = 16;
  const ATOM_ROWS = 8;

  /** A layout that cannot be built, or cannot serve the access. */
  class LayoutError extends Error {}

  /**
   * The layout of a tile.
   *
   * settings.layout is "plain", "padded" (`pad` elements after each row) or "swizzled": CuTe's Swizzle<B, M, S> on the
   * element index. atom = 0 swizzles the row-major tile; else atoms of 8 rows x `atom` columns fill the tile, the rows
   * first, as with `tile_to_shape`.
   *
   * Returns {text, cosize, index(row, col)}; the index and the cosize count elements.
   */
  function layoutOf(settings) {
    const { rows, cols, layout, pad, B, M, S, atom } = settings;
    if (layout !== "swizzled") {
      const stride = layout === "padded" ? cols + pad : cols;
      return {
        text: `(${rows},${cols}):(${stride},1)`,
        cosize: (rows - 1) * stride + cols,
        index: (row, col) => row * stride + col,
      };
    }
    if (S < B) {
      throw new LayoutError(`Swizzle<${B},${M},${S}> reads and changes the same bits. Choose S of at least ${B}.`);
    }
    if (atom && (cols % atom || rows % ATOM_ROWS)) {
      throw new LayoutError(`Atoms of ${ATOM_ROWS} x ${atom} do not divide a tile of ${rows} x ${cols}.`);
    }
    const mask = ((1 << B) - 1) << (M + S);
    const swizzle = (index) => index ^ ((index & mask) >> S);
    const period = 1 << (M + B);
    const width = atom || cols;
    const [down, across] = [rows / ATOM_ROWS, cols / width];
    const affine = atom
      ? `((${ATOM_ROWS},${down}),(${atom},${across})):` +
        `((${atom},${down > 1 ? ATOM_ROWS * atom : 0}),(1,${across > 1 ? rows * atom : 0}))`
      : `(${rows},${cols}):(${cols},1)`;
    return {
      text: `S<${B},${M},${S}> o 0 o ${affine}`,
      cosize: Math.ceil((rows * cols) / period) * period,
      index: (row, col) => swizzle(row * width + (col % width) + Math.floor(col / width) * rows * width),
    };
  }

  /** Bytes that a thread reads: ldmatrix takes 16, the other accesses `width`. */
  const bytesPerThread = (settings) => (settings.access === "ldmatrix" ? CHUNK_BYTES : settings.width);

  /** Elements that a thread reads. */
  const vectorLength = (settings) => bytesPerThread(settings) / settings.bytes;

  /** How the instructions of an access divide the tile. */
  function grid(settings) {
    const { rows, cols, access } = settings;
    const vectors = Math.ceil(cols / vectorLength(settings));
    if (access === "ldmatrix") return { vectors, across: Math.ceil(vectors / 2), down: Math.ceil(rows / 16) };
    if (access === "column") return { vectors, across: vectors, down: Math.ceil(rows / WARP) };
    return { vectors, across: 1, down: Math.ceil((rows * vectors) / WARP) };
  }

  /** The number of instructions that cover the tile. */
  const instructionCount = (settings) => grid(settings).across * grid(settings).down;

  /** Where each lane of an instruction reads: [row, col], or null for a lane beyond the tile. */
  function coordsOf(settings, instruction) {
    const { rows, cols, access } = settings;
    const { vectors, across } = grid(settings);
    const length = vectorLength(settings);
    const [row0, col0] = [Math.floor(instruction / across), instruction % across];
    return Array.from({ length: WARP }, (_, lane) => {
      let row, col;
      if (access === "ldmatrix") {
        // Four matrices of 8 rows x 16 bytes: the second is to the right of the first, the next two are below.
        row = row0 * 16 + Math.floor(lane / 16) * 8 + (lane % 8);
        col = (col0 * 2 + (Math.floor(lane / 8) % 2)) * length;
      } else if (access === "column") {
        row = row0 * WARP + lane;
        col = col0 * length;
      } else {
        const vector = instruction * WARP + lane;
        row = Math.floor(vector / vectors);
        col = (vector % vectors) * length;
      }
      return row < rows && col < cols ? [row, col] : null;
    });
  }

  /** The instruction that reads an element. */
  function instructionAt(settings, row, col) {
    const { vectors, across } = grid(settings);
    const vector = Math.floor(col / vectorLength(settings));
    if (settings.access === "ldmatrix") return Math.floor(row / 16) * across + Math.floor(vector / 2);
    if (settings.access === "column") return Math.floor(row / WARP) * across + vector;
    return Math.floor((row * vectors + vector) / WARP);
  }

  /** How to choose a layout whose vectors of `length` elements are contiguous and aligned. */
  function alignmentHint({ layout, M }, length) {
    if (layout === "padded") return `Choose columns and padding that are multiples of ${length} elements.`;
    if (layout === "swizzled" && 1 << M < length) return `Choose M of at least ${Math.log2(length)}.`;
    return `Choose a multiple of ${length} columns.`;
  }

  /** The byte address of a thread's vector. The layout must keep it in one aligned piece. */
  function addressOf(settings, layout, [row, col]) {
    const length = vectorLength(settings);
    const size = `${bytesPerThread(settings)} bytes`;
    if (col + length > settings.cols) {
      throw new LayoutError(`${settings.cols} columns are not a multiple of ${size} (${length} elements).`);
    }
    const first = layout.index(row, col);
    for (let step = 0; step < length; step++) {
      if (layout.index(row, col + step) !== first - (first % length) + step) {
        throw new LayoutError(
          `A thread reads ${size} in one aligned piece, but the layout has none at row ${row}, column ${col}. ` +
            alignmentHint(settings, length),
        );
      }
    }
    return first * settings.bytes;
  }

  /** One phase. `lanes`: [thread, byte address]; `width`: bytes per thread. No two threads read the same word. */
  function phaseOf(width, lanes) {
    const words = Array.from({ length: NUM_BANKS }, () => []); // bank -> [thread, word]
    for (const [thread, address] of lanes) {
      for (let word = address; word < address + width; word += BANK_BYTES) words[bankOf(word)].push([thread, word]);
    }
    const counts = words.map((ofBank) => ofBank.length);
    const wavefronts = Math.max(...counts);
    // Wavefront -> [thread, word]: the next word of each bank that has one left.
    const served = Array.from({ length: wavefronts }, (_, i) => words.map((ofBank) => ofBank[i]).filter(Boolean));
    return { lanes, counts, wavefronts, served };
  }

  const bankOf = (address) => Math.floor(address / BANK_BYTES) % NUM_BANKS;

  /** One instruction: its coordinates and its phases. */
  function accessOf(settings, layout, instruction) {
    const width = bytesPerThread(settings);
    const perPhase = WAVEFRONT_BYTES / width;
    const coords = coordsOf(settings, instruction);
    const phases = [];
    for (let begin = 0; begin < WARP; begin += perPhase) {
      const lanes = [];
      for (let lane = begin; lane < begin + perPhase; lane++) {
        if (coords[lane]) lanes.push([lane, addressOf(settings, layout, coords[lane])]);
      }
      if (lanes.length) phases.push(phaseOf(width, lanes));
    }
    return { coords, phases, ...countsOf(phases) };
  }

  /** A phase without conflicts takes one wavefront. */
  function countsOf(phases) {
    const wavefronts = phases.reduce((sum, phase) => sum + phase.wavefronts, 0);
    return { wavefronts, ideal: phases.length, conflicts: wavefronts - phases.length };
  }

  /**
   * All numbers of the panel.
   *
   * settings: rows, cols, bytes (of an element: 1, 2, 4), layout and its pad or B, M, S, atom (see `layoutOf`),
   * access ("ldmatrix", "row", "column"), width (bytes per thread of a row or column: 4, 8, 16), instruction.
   *
   * Returns {error} or {layout, bytes, instruction: {coords, phases, wavefronts, ideal, conflicts},
   * tile: {instructions, wavefronts, ideal, conflicts}}.
   */
  function analyze(settings) {
    try {
      const layout = layoutOf(settings);
      const tile = { instructions: instructionCount(settings), wavefronts: 0, ideal: 0, conflicts: 0 };
      let chosen = null;
      for (let i = 0; i < tile.instructions; i++) {
        const access = accessOf(settings, layout, i);
        for (const name of ["wavefronts", "ideal", "conflicts"]) tile[name] += access[name];
        if (i === settings.instruction) chosen = access;
      }
      return { layout: layout.text, bytes: layout.cosize * settings.bytes, instruction: chosen, tile };
    } catch (error) {
      if (error instanceof LayoutError) return { error: error.message };
      throw error;
    }
  }

  /** (row, col) -> the bank of an element; null if the layout cannot be built. */
  function bankMap(settings) {
    try {
      const layout = layoutOf(settings);
      return (row, col) => bankOf(layout.index(row, col) * settings.bytes);
    } catch (error) {
      if (error instanceof LayoutError) return null;
      throw error;
    }
  }

  /** The same computation in Python; it defines `layout` and `access`. */
  function pythonOf(settings) {
    const { rows, cols, bytes, layout, pad, B, M, S, atom, access, instruction } = settings;
    const { vectors, across } = grid(settings);
    const length = vectorLength(settings);
    const [row0, col0] = [Math.floor(instruction / across), instruction % across];
    const plus = (offset) => (offset ? `${offset} + ` : "");
    const swizzled = (inner) => `ComposedLayout(Swizzle(${B}, ${M}, ${S}), 0, ${inner})`;
    let names = ["Layout"];
    let lines = [`layout = Layout((${rows}, ${cols}), (${layout === "padded" ? cols + pad : cols}, 1))`];
    if (layout === "swizzled") {
      names = ["ComposedLayout", "Layout", "Swizzle"];
      lines = [`layout = ${swizzled(`Layout((${rows}, ${cols}), (${cols}, 1))`)}`];
      if (atom) {
        names.push("tile_to_shape");
        lines = [
          `atom = ${swizzled(`Layout((${ATOM_ROWS}, ${atom}), (${atom}, 1))`)}`,
          `layout = tile_to_shape(atom, (${rows}, ${cols}))`,
        ];
      }
    }
    const vector = `(${plus(instruction * WARP)}lane)`;
    const coord = {
      ldmatrix: `${plus(row0 * 16)}lane // 16 * 8 + lane % 8, ${plus(col0 * 2 * length)}lane // 8 % 2 * ${length}`,
      column: `${plus(row0 * WARP)}lane, ${col0 * length}`,
      row: `${vector} // ${vectors}, ${vector} % ${vectors} * ${length}`,
    }[access];
    lines.push(`coords = [(${coord}) for lane in range(${WARP})]`);
    if (coordsOf(settings, instruction).includes(null)) {
      lines.push(`coords = [(row, col) if row < ${rows} and col < ${cols} else None for row, col in coords]`);
    }
    names = [...new Set([...names, "Vector", "warp_access"])].sort();
    return [
      `from layouts import ${names.join(", ")}`,
      "",
      ...lines,
      `access = warp_access(layout, coords, Vector(${bytesPerThread(settings)}, ${bytes}))`,
      "print(access.wavefronts, access.ideal, access.conflicts)",
    ].join("\n");
  }

  window.playgroundBanks = {
    NUM_BANKS, analyze, bankMap, bankOf, bytesPerThread, instructionAt, instructionCount, pythonOf, vectorLength,
  };
})();
