// Draws a tile by banks, the wavefronts of an instruction, and a mask with its blocks, on canvases.
"use strict";

(() => {
  const { NUM_BANKS, bankMap, bankOf, vectorLength } = window.playgroundBanks;
  const { PARTIAL, FULL, visibleKeys } = window.playgroundMasks;
  const MARGIN = { left: 40, top: 18 };
  const CHART_LEFT = 56;

  /** Colours of the page, from the custom properties of the stylesheet. */
  function themeOf(canvas) {
    const style = getComputedStyle(canvas);
    const value = (name) => style.getPropertyValue(`--pg-${name}`).trim();
    const bank = (number, [saturation, lightness]) =>
      `hsl(${(number * 360) / NUM_BANKS} ${saturation} ${lightness})`;
    return {
      value,
      font: (size, weight = "400") => `${weight} ${size}px ${style.fontFamily}`,
      idle: (number) => bank(number, value("bank-idle").split(" ")),
      read: (number) => bank(number, value("bank-read").split(" ")),
    };
  }

  /** A context in CSS pixels; null while the canvas has no width. */
  function prepare(canvas, height, width = canvas.parentElement.clientWidth) {
    if (!width) return null;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.textBaseline = "middle";
    context.textAlign = "center";
    return context;
  }

  /** Text in the middle of a box, if it fits. */
  function label(context, text, x, y, width, height) {
    if (context.measureText(text).width <= width - 2) context.fillText(text, x + width / 2, y + height / 2 + 0.5);
  }

  /** The rows to draw: those of the instruction and their neighbours, or all. */
  function rowsDrawn(settings, result) {
    if (settings.allRows || settings.rows <= 16) return [0, settings.rows];
    const read = result.error ? [0] : result.instruction.coords.filter(Boolean).map(([row]) => row);
    const begin = Math.floor(Math.min(...read) / 16) * 16;
    const end = Math.ceil((Math.max(...read) + 1) / 16) * 16;
    return [begin, Math.min(settings.rows, end)];
  }

  function rowHeight(rows) {
    if (rows <= 16) return 20;
    if (rows <= 32) return 14;
    return rows <= 64 ? 9 : 6;
  }

  /**
   * The tile: one cell per element, coloured by bank; the vectors of the instruction are outlined.
   * Returns (x, y) -> [row, col], or null outside.
   */
  function drawTile(canvas, settings, result) {
    const [begin, end] = rowsDrawn(settings, result);
    const height = rowHeight(end - begin);
    const context = prepare(canvas, MARGIN.top + (end - begin) * height + 2);
    const bankAt = bankMap(settings);
    if (!context || !bankAt) return () => null;
    const theme = themeOf(canvas);
    const { cols } = settings;
    const width = (canvas.parentElement.clientWidth - MARGIN.left - 2) / cols;
    const length = vectorLength(settings);
    const coords = result.error ? [] : result.instruction.coords.filter(Boolean);
    const read = new Set(coords.map(([row, col]) => row * cols + col));
    const edge = (col) => Math.round(MARGIN.left + col * width);

    context.font = theme.font(10);
    context.fillStyle = theme.value("muted");
    const step = labelStep(cols, width, 34);
    for (let col = 0; col < cols; col += step) label(context, `${col}`, edge(col) - 20, 0, 44, MARGIN.top - 4);
    context.textAlign = "right";
    const rowStep = height >= 12 ? 1 : 8;
    for (let row = begin; row < end; row++) {
      if (row % rowStep === 0) context.fillText(`${row}`, MARGIN.left - 6, MARGIN.top + (row - begin + 0.5) * height);
    }
    context.textAlign = "center";

    for (let row = begin; row < end; row++) {
      const y = MARGIN.top + (row - begin) * height;
      for (let col = 0; col < cols; ) {
        // Neighbours in one bank are one cell.
        const bank = bankAt(row, col);
        const isRead = read.has(row * cols + col - (col % length));
        let next = col + 1;
        while (next < cols && next % length && bankAt(row, next) === bank) next++;
        context.fillStyle = isRead ? theme.read(bank) : theme.idle(bank);
        context.fillRect(edge(col), y, edge(next) - edge(col), height - 1);
        col = next;
      }
      if (height >= 12) labelBanks(context, theme, bankAt, row, y, { settings, edge, height, read, length });
    }
    context.strokeStyle = theme.value("text");
    context.lineWidth = 1.5;
    for (const [row, col] of coords) {
      if (row < begin || row >= end) continue;
      const y = MARGIN.top + (row - begin) * height;
      context.strokeRect(edge(col) + 0.5, y - 0.5, edge(col + length) - edge(col) - 1, height);
    }
    return (x, y) => {
      const row = begin + Math.floor((y - MARGIN.top) / height);
      const col = Math.floor((x - MARGIN.left) / width);
      return row >= begin && row < end && col >= 0 && col < cols ? [row, col] : null;
    };
  }

  /** Bank numbers: one per word where it fits, else one range, or the first number of it, per 16 bytes. */
  function labelBanks(context, theme, bankAt, row, y, { settings, edge, height, read, length }) {
    const perWord = Math.max(1, 4 / settings.bytes);
    const words = edge(perWord) - edge(0) >= 18 ? 1 : 4;
    const run = perWord * words;
    context.font = theme.font(Math.min(11, height - 4));
    const isWide = context.measureText("28–31").width <= edge(run) - edge(0) - 2;
    for (let col = 0; col + run <= settings.cols; col += run) {
      const [first, last] = [bankAt(row, col), bankAt(row, col + run - 1)];
      if (last - first !== words - 1) continue;
      const isRead = read.has(row * settings.cols + col - (col % length));
      if (isRead && length < run) continue; // only a part of the 16 bytes is read
      context.fillStyle = isRead ? theme.value("on-bank") : theme.value("muted");
      const text = words === 4 && isWide ? `${first}–${last}` : `${first}`;
      label(context, text, edge(col), y, edge(col + run) - edge(col), height - 1);
    }
  }

  /** The smallest power of two whose labels are `space` pixels apart. */
  function labelStep(count, width, space) {
    let step = 1;
    while (step * width < space && step < count) step *= 2;
    return step;
  }

  /** The wavefronts of an instruction: a row each, a column per bank. */
  function drawWavefronts(canvas, result) {
    const { phases, wavefronts } = result.instruction;
    const [height, gap] = [13, 5];
    const context = prepare(canvas, MARGIN.top + wavefronts * height + (phases.length - 1) * gap + 2);
    if (!context) return;
    const theme = themeOf(canvas);
    const width = (canvas.parentElement.clientWidth - CHART_LEFT - 2) / NUM_BANKS;
    const edge = (bank) => Math.round(CHART_LEFT + bank * width);
    context.font = theme.font(10);
    context.fillStyle = theme.value("muted");
    for (let bank = 0; bank < NUM_BANKS; bank += width >= 16 ? 1 : 4) {
      context.fillText(`${bank}`, CHART_LEFT + (bank + 0.5) * width, MARGIN.top / 2 - 2);
    }
    let y = MARGIN.top;
    for (const phase of phases) {
      const threads = phase.lanes.map(([thread]) => thread);
      context.textAlign = "right";
      context.fillStyle = theme.value("muted");
      context.fillText(`t${threads[0]}–${threads[threads.length - 1]}`, CHART_LEFT - 6, y + height / 2);
      context.textAlign = "center";
      for (const served of phase.served) {
        for (let bank = 0; bank < NUM_BANKS; bank++) {
          context.fillStyle = theme.value("empty");
          context.fillRect(edge(bank), y, edge(bank + 1) - edge(bank) - 1, height - 1);
        }
        drawServed(context, theme, served, y, { edge, height });
        y += height;
      }
      y += gap;
    }
  }

  /** The words of one wavefront; words of one thread side by side are one box. */
  function drawServed(context, theme, served, y, { edge, height }) {
    const labels = Array.from({ length: NUM_BANKS }, () => "");
    for (const [thread, word] of served) labels[bankOf(word)] = `t${thread}`;
    for (let bank = 0; bank < NUM_BANKS; ) {
      let next = bank + 1;
      while (next < NUM_BANKS && labels[next] === labels[bank]) next++;
      for (let i = bank; labels[bank] && i < next; i++) {
        context.fillStyle = theme.read(i);
        context.fillRect(edge(i), y, edge(i + 1) - edge(i) - (i + 1 === next ? 1 : 0), height - 1);
      }
      context.fillStyle = theme.value("on-bank");
      label(context, labels[bank], edge(bank), y, edge(next) - edge(bank), height - 1);
      bank = next;
    }
  }

  /**
   * The mask: blocks coloured by their class, and the visible pairs of partial blocks.
   * Returns (x, y) -> [query, key], or null outside.
   */
  function drawMask(canvas, settings, result) {
    const { sq, sk, tileM, tileN } = settings;
    const room = canvas.parentElement.clientWidth - MARGIN.left - 2;
    const scale = Math.min(room / sk, 520 / sq);
    const [width, height] = [Math.max(24, sk * scale), Math.max(24, sq * scale)];
    const context = prepare(canvas, MARGIN.top + height + 2, MARGIN.left + width + 2);
    if (!context) return () => null;
    const theme = themeOf(canvas);
    const [perKey, perQuery] = [width / sk, height / sq];
    const x = (key) => MARGIN.left + Math.min(key, sk) * perKey;
    const y = (query) => MARGIN.top + Math.min(query, sq) * perQuery;

    context.font = theme.font(10);
    context.fillStyle = theme.value("muted");
    const keyStep = tileN * labelStep(sk / tileN, tileN * perKey, 40);
    for (let key = 0; key < sk; key += keyStep) label(context, `${key}`, x(key) - 20, 0, 44, MARGIN.top - 4);
    context.textAlign = "right";
    const queryStep = tileM * labelStep(sq / tileM, tileM * perQuery, 16);
    for (let query = 0; query < sq; query += queryStep) context.fillText(`${query}`, MARGIN.left - 6, y(query) + 5);

    const fillBlocks = (kinds) => {
      result.status.forEach((row, m) =>
        row.forEach((kind, n) => {
          if (!(kind in kinds)) return;
          context.fillStyle = kinds[kind];
          const [left, top] = [x(n * tileN), y(m * tileM)];
          context.fillRect(left, top, x((n + 1) * tileN) - left, y((m + 1) * tileM) - top);
        }),
      );
    };
    context.fillStyle = theme.value("empty");
    context.fillRect(x(0), y(0), width, height);
    fillBlocks({ [PARTIAL]: theme.value("partial") });
    const keysOf = visibleKeys(settings);
    context.fillStyle = theme.value("pair");
    // One strip per pixel: boxes with fractional heights would show seams.
    const pixel = 1 / (window.devicePixelRatio || 1);
    for (let top = 0; top < height; top += pixel) {
      const [begin, end] = keysOf(Math.min(sq - 1, Math.floor((top + pixel / 2) / perQuery)));
      context.fillRect(x(begin), MARGIN.top + top, x(end) - x(begin), Math.min(pixel, height - top));
    }
    fillBlocks({ [FULL]: theme.value("full") });

    context.strokeStyle = theme.value("surface");
    context.lineWidth = 1;
    context.beginPath();
    for (let key = tileN; tileN * perKey >= 4 && key < sk; key += tileN) {
      context.moveTo(Math.round(x(key)) + 0.5, y(0));
      context.lineTo(Math.round(x(key)) + 0.5, y(sq));
    }
    for (let query = tileM; tileM * perQuery >= 4 && query < sq; query += tileM) {
      context.moveTo(x(0), Math.round(y(query)) + 0.5);
      context.lineTo(x(sk), Math.round(y(query)) + 0.5);
    }
    context.stroke();
    return (px, py) => {
      const key = Math.floor((px - MARGIN.left) / perKey);
      const query = Math.floor((py - MARGIN.top) / perQuery);
      return key >= 0 && key < sk && query >= 0 && query < sq ? [query, key] : null;
    };
  }

  window.playgroundDraw = { drawMask, drawTile, drawWavefronts, rowsDrawn };
})();
