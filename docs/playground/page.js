// The controls of the playground, its results, and the settings in the address of the page.
//
// It fills the elements #playground-banks and #playground-masks, where they exist.
"use strict";

(() => {
  const banks = window.playgroundBanks;
  const masks = window.playgroundMasks;
  const { drawMask, drawTile, drawWavefronts, rowsDrawn } = window.playgroundDraw;

  // ---- The controls of both panels. `shown`: whether the settings use a control.

  const isSwizzled = (s) => s.layout === "swizzled";
  const BANK_FIELDS = [
    { name: "rows", label: "Rows", kind: "int", min: 8, max: 128, step: 8, help: "Keys of a K block, for example." },
    { name: "cols", label: "Columns", kind: "int", min: 4, max: 256, step: 4, help: "The head dim, for example." },
    {
      name: "bytes", label: "Element size", kind: "number choice", help: "A bank is 4 bytes wide.",
      options: { 1: "1 byte (fp8)", 2: "2 bytes (fp16, bf16)", 4: "4 bytes (fp32)" },
    },
    {
      name: "layout", label: "Layout", kind: "choice", help: "How (row, column) becomes an address.",
      options: { plain: "plain", padded: "padded", swizzled: "swizzled" },
    },
    {
      name: "pad", label: "Padding", kind: "int", min: 0, max: 32, shown: (s) => s.layout === "padded",
      help: "Unused elements after each row.",
    },
    {
      name: "atom", label: "Atom", kind: "number choice", shown: isSwizzled,
      help: "The swizzled block that repeats, down the rows first.",
      options: { 0: "the whole tile", 16: "8 × 16", 32: "8 × 32", 64: "8 × 64", 128: "8 × 128" },
    },
    {
      name: "B", label: "Swizzle B", kind: "int", min: 0, max: 5, shown: isSwizzled,
      help: "B bits of the element index change.",
    },
    {
      name: "M", label: "Swizzle M", kind: "int", min: 0, max: 6, shown: isSwizzled,
      help: "The lowest M bits stay, so 2^M elements move together.",
    },
    {
      name: "S", label: "Swizzle S", kind: "int", min: 0, max: 7, shown: isSwizzled,
      help: "The bits that are XORed into them are S places higher.",
    },
    {
      name: "access", label: "Access", kind: "choice", help: "Addresses that the 32 threads of a warp read.",
      options: { ldmatrix: "ldmatrix.x4 (8 × 8)", row: "along rows", column: "down a column" },
    },
    {
      name: "width", label: "Bytes per thread", kind: "number choice", shown: (s) => s.access !== "ldmatrix",
      help: "A phase serves 128 bytes: 32, 16 or 8 threads.", options: { 4: "4", 8: "8", 16: "16" },
    },
    {
      name: "instruction", label: "Instruction", kind: "slider", max: (s) => banks.instructionCount(s) - 1,
      help: "Moves over the tile; you can also click the tile.",
    },
    {
      name: "allRows", label: "Draw all rows", kind: "bool", shown: (s) => s.rows > 16,
      help: "Otherwise only rows near the instruction.",
    },
  ];
  const MASK_FIELDS = [
    { name: "sq", label: "Queries", kind: "int", min: 1, max: 16384, help: "Rows of the picture." },
    { name: "sk", label: "Keys", kind: "int", min: 1, max: 16384, help: "Columns of the picture." },
    {
      name: "mask", label: "Mask", kind: "choice", help: "Causal aligns the last query with the last key.",
      options: { full: "full", causal: "causal", prefix: "prefix-LM" },
    },
    {
      name: "prefix", label: "Prefix", kind: "int", min: 0, max: 16384, shown: (s) => s.mask === "prefix",
      help: "All queries see this many first keys; the rest is causal.",
    },
    {
      name: "left", label: "Window left", kind: "optional int", max: 16384,
      help: "Keys before its position that a query sees.",
    },
    {
      name: "right", label: "Window right", kind: "optional int", max: 16384, shown: (s) => s.mask !== "causal",
      help: "Keys after its position that a query sees.",
    },
    {
      name: "documents", label: "Documents", kind: "list", max: 16384,
      help: "Lengths of packed documents, such as 700, 1500.",
    },
    {
      name: "tileM", label: "Queries of a block", kind: "int", min: 1, max: 1024,
      help: "The kernels take multiples of 128.",
    },
    {
      name: "tileN", label: "Keys of a block", kind: "int", min: 1, max: 1024,
      help: "The kernels take multiples of 128.",
    },
  ];

  // ---- Presets: changes of the defaults, in groups.

  const BANK_DEFAULTS = {
    rows: 64, cols: 128, bytes: 2, layout: "plain", pad: 8, atom: 64, B: 3, M: 3, S: 3, access: "ldmatrix", width: 4,
    instruction: 0, allRows: false,
  };
  const FLOATS = { rows: 32, cols: 32, bytes: 4, pad: 1, atom: 0, B: 5, M: 0, S: 5, access: "column" };
  const BANK_PRESETS = {
    "FA2's K tile, D = 128": [
      {
        name: "plain", changes: {},
        text: "A row is 256 bytes, twice around the 32 banks. All rows of a column are in the same banks.",
      },
      { name: "padded", changes: { layout: "padded" }, text: "16 unused bytes shift each row by four banks." },
      {
        name: "swizzled", changes: { layout: "swizzled" },
        text: "The number of each 16-byte chunk is XORed with the row: no conflicts, no unused bytes.",
      },
      {
        name: "swizzled, wrong atom", changes: { layout: "swizzled", atom: 0 },
        text: "Swizzle<3,3,3> is made for rows of 64 elements. On rows of 128, two rows collide; S = 4 separates them.",
      },
    ],
    "32 × 32 floats, by columns": [
      { name: "plain", changes: FLOATS, text: "The textbook case: a whole column is in one bank." },
      {
        name: "padded by 1", changes: { ...FLOATS, layout: "padded" },
        text: "One unused float shifts each row by one bank.",
      },
      {
        name: "swizzled", changes: { ...FLOATS, layout: "swizzled" },
        text: "Swizzle<5,0,5> XORs the column with the row.",
      },
    ],
  };
  const MASK_DEFAULTS = {
    sq: 2048, sk: 2048, mask: "causal", prefix: 512, left: null, right: null, documents: [], tileM: 128, tileN: 128,
  };
  const MASK_PRESETS = {
    Masks: [
      { name: "causal", changes: {}, text: "Half of the pairs are masked. Only blocks on the diagonal need the mask." },
      {
        name: "Mistral window", changes: { sq: 8192, sk: 8192, left: 4095 },
        text: "Each query sees 4096 keys: its own and the 4095 before it.",
      },
      {
        name: "packed documents", changes: { sq: 4096, sk: 4096, documents: [700, 1500, 300, 1100, 496] },
        text: "Five documents in one sequence, causal within each.",
      },
      { name: "prefix-LM", changes: { mask: "prefix" }, text: "All queries see a prompt of 512 keys." },
      {
        name: "chunked prefill", changes: { sq: 512 },
        text: "The last 512 queries of 2048 keys: causal is aligned to the bottom right.",
      },
      {
        name: "local, both sides", changes: { mask: "full", left: 256, right: 256 },
        text: "An encoder whose queries see 256 keys on each side.",
      },
      {
        name: "ragged end", changes: { sq: 1000, sk: 1000, mask: "full" },
        text: "1000 is not a multiple of 128. The last K/V blocks have fewer than 128 keys, so they are partial.",
      },
    ],
  };

  // ---- Settings as text, for the address of the page.

  const clamp = (value, { min = 0, max }, settings) =>
    Math.min(typeof max === "function" ? max(settings) : max, Math.max(min, value));

  /** A setting from the text of a control or of the address; undefined if it is not valid. */
  function parse(field, text, settings) {
    const number = /^\s*\d{1,6}\s*$/.test(text) ? Number(text) : NaN;
    switch (field.kind) {
      case "bool": return text === "true";
      case "choice": return text in field.options ? text : undefined;
      case "number choice": return text.trim() in field.options ? Number(text) : undefined;
      case "list": {
        const numbers = text.split(/[\s,;]+/).filter(Boolean).map(Number);
        const isValid = numbers.every((x) => Number.isInteger(x) && x >= 0 && x <= field.max) && numbers.length <= 256;
        return isValid ? numbers : undefined;
      }
      case "optional int": if (text.trim() === "") return null; // falls through
      default: return Number.isNaN(number) ? undefined : clamp(number, field, settings);
    }
  }

  const textOf = (value) => (value === null ? "" : Array.isArray(value) ? value.join(",") : String(value));

  /** The settings in a hash such as "#banks.rows=64&masks.sq=512"; defaults for the rest. */
  function settingsOf(prefix, fields, defaults, hash) {
    const given = new URLSearchParams(hash.replace(/^#/, ""));
    const settings = { ...defaults };
    for (const field of fields) {
      const text = given.get(`${prefix}.${field.name}`);
      const value = text === null ? undefined : parse(field, text, settings);
      if (value !== undefined) settings[field.name] = value;
    }
    return settings;
  }

  function hashOf(panels, shown) {
    const given = new URLSearchParams({ panel: shown });
    for (const { prefix, fields, settings } of panels) {
      for (const { name } of fields) given.set(`${prefix}.${name}`, textOf(settings[name]));
    }
    return `#${given}`.replaceAll("%2C", ",");
  }

  // ---- Elements

  /** element("p", {class: "a"}, "text", child) */
  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  /** A control with its label and its help: {row, read() -> text, show(settings)}. */
  function controlOf(prefix, field, onInput) {
    const id = `pg-${prefix}-${field.name}`;
    const isNumber = field.kind === "int" || field.kind === "optional int";
    const attributes = { id, name: field.name, "aria-describedby": `${id}-help` };
    let input;
    if (field.options) {
      const options = Object.entries(field.options).map(([value, text]) => element("option", { value }, text));
      input = element("select", attributes, ...options);
    } else {
      const type = { bool: "checkbox", slider: "range", list: "text" }[field.kind] || "number";
      input = element("input", { ...attributes, type });
      if (isNumber) for (const key of ["min", "max", "step"]) if (key in field) input.setAttribute(key, field[key]);
      if (field.kind === "optional int") input.setAttribute("placeholder", "all");
      if (field.kind === "list") input.setAttribute("placeholder", "none");
    }
    const value = element("output", { class: "pg-value", for: id });
    const text = element("label", { for: id }, field.label);
    const help = element("small", { id: `${id}-help` }, field.help);
    const row = element("div", { class: `pg-field pg-${field.kind.replace(" ", "-")}` }, text, input, help);
    if (field.kind === "slider") text.append(value);
    input.addEventListener("input", () => onInput(field, field.kind === "bool" ? String(input.checked) : input.value));
    // A value that was clamped, or not valid, is shown as it is used once the control loses the focus.
    input.addEventListener("change", () => onInput(null));
    return {
      row,
      show(settings, isTyping) {
        row.hidden = field.shown ? !field.shown(settings) : false;
        if (field.kind === "bool") input.checked = settings[field.name];
        else if (field.kind === "slider") {
          input.max = field.max(settings);
          input.value = settings[field.name];
          value.textContent = ` ${settings[field.name] + 1} of ${field.max(settings) + 1}`;
          input.setAttribute("aria-valuetext", value.textContent.trim());
        } else if (!isTyping || document.activeElement !== input) {
          input.value = textOf(settings[field.name]).replaceAll(",", ", ");
        }
      },
    };
  }

  const summaryOf = (text) =>
    element("summary", {}, element("span", { class: "pg-marker", "aria-hidden": "true" }, "▸"), text);

  /** Presets, controls and results of one panel. `view` makes the results: {nodes, show(settings)}. */
  class Panel {
    constructor(root, { prefix, fields, defaults, presets, view, python, adjust }, onChange) {
      Object.assign(this, { prefix, fields, defaults, python, adjust, onChange });
      this.settings = { ...defaults };
      this.view = view((name, value) => this.set({ ...this.settings, [name]: value }));
      this.presets = Object.values(presets).flat();
      this.buttons = [];
      const groups = Object.entries(presets).map(([title, members]) => {
        const buttons = members.map(({ name, changes }) => {
          const button = element("button", { type: "button" }, name);
          button.addEventListener("click", () => this.set({ ...defaults, ...changes }));
          return button;
        });
        this.buttons.push(...buttons);
        const attributes = { class: "pg-presets", role: "group", "aria-label": `Presets: ${title}` };
        return element("div", attributes, element("span", { class: "pg-group" }, title), ...buttons);
      });
      this.note = element("p", { class: "pg-note" });
      this.controls = fields.map((field) => controlOf(prefix, field, (...input) => this.input(...input)));
      this.code = element("code");
      this.link = element("a", { class: "pg-link", href: "#" }, "Link to these settings");
      this.copied = element("span", { class: "pg-copied", role: "status" });
      this.link.addEventListener("click", () => this.copyLink());
      const isWide = window.matchMedia("(min-width: 45em)").matches;
      const settings = element(
        "details", { class: "pg-settings", ...(isWide ? { open: "" } : {}) },
        summaryOf("Settings"),
        element("div", { class: "pg-fields" }, ...this.controls.map((control) => control.row)),
      );
      const results = element(
        "div", { class: "pg-results" },
        ...this.view.nodes,
        element("details", { class: "pg-python" }, summaryOf("The same in Python"), element("pre", {}, this.code)),
        element("p", { class: "pg-share" }, this.link, this.copied),
      );
      root.classList.add("pg");
      root.replaceChildren(
        ...groups,
        this.note,
        element("div", { class: "pg-body" }, settings, results),
      );
      this.root = root;
    }

    input(field, text) {
      if (!field) return this.show();
      const value = parse(field, text, this.settings);
      if (value === undefined) return;
      const before = this.settings;
      this.set({ ...before, ...this.adjust(before, { [field.name]: value }) }, true);
    }

    set(settings, isTyping = false) {
      const slider = this.fields.find(({ kind }) => kind === "slider");
      if (slider) settings = { ...settings, [slider.name]: clamp(settings[slider.name], slider, settings) };
      this.settings = settings;
      this.show(isTyping);
      this.onChange(this);
    }

    show(isTyping = false) {
      const chosen = this.presets.findIndex(({ changes }) => {
        const preset = { ...this.defaults, ...changes };
        return this.fields.every(({ name, shown }) => {
          const isOfPicture = name === "instruction" || name === "allRows";
          return isOfPicture || (shown && !shown(preset)) || textOf(preset[name]) === textOf(this.settings[name]);
        });
      });
      this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === chosen)));
      this.note.textContent = chosen < 0 ? "Your own settings." : this.presets[chosen].text;
      for (const control of this.controls) control.show(this.settings, isTyping);
      this.code.textContent = this.python(this.settings);
      this.copied.textContent = "";
      this.view.show(this.settings);
    }

    copyLink() {
      navigator.clipboard?.writeText(this.link.href).then(
        () => { this.copied.textContent = "copied"; },
        () => {}, // the link itself stays
      );
    }
  }

  // ---- Results

  const NO_TEXT = "\u00a0"; // keeps the height of a line
  const count = (value) => value.toLocaleString("en");
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

  /** Big numbers with a caption: {node, show({name: text})}. */
  function statsOf(captions) {
    const values = {};
    const cells = Object.entries(captions).map(([name, caption]) => {
      values[name] = element("dd", { "data-value": name });
      return element("div", {}, element("dt", {}, caption), values[name]);
    });
    return {
      node: element("dl", { class: "pg-stats" }, ...cells),
      show(texts) { for (const [name, text] of Object.entries(texts)) values[name].textContent = text; },
    };
  }

  function figureOf(title, caption) {
    const canvas = element("canvas", { role: "img" });
    const text = element("figcaption", {}, element("strong", {}, title), " ", caption);
    return { canvas, node: element("figure", {}, text, element("div", { class: "pg-canvas" }, canvas)) };
  }

  /** Calls back with what is under the pointer. */
  function onPoint(canvas, type, find, callback) {
    canvas.addEventListener(type, (event) => {
      const found = find()(event.offsetX, event.offsetY);
      if (found) callback(...found);
    });
  }

  /** The sentence above the numbers. */
  function verdictOf(result) {
    if (result.error) return ["error", "Not possible.", result.error];
    const { phases, wavefronts, ideal } = result.instruction;
    const ways = Math.max(...phases.map((phase) => phase.wavefronts));
    if (ways === 1) {
      const fewest = `${plural(wavefronts, "wavefront")}, the fewest possible`;
      return ["good", "No bank conflict.", `No bank delivers more than one word per phase: ${fewest}.`];
    }
    const text = `A bank must deliver ${ways} words one after the other: ${wavefronts} wavefronts instead of ${ideal}.`;
    return ["bad", `${ways}-way bank conflict.`, text];
  }

  /** The sentence below the pictures. */
  function summaryOfTile(settings, { layout, tile }) {
    const parts = ["Layout ", element("code", {}, layout)];
    if (settings.layout === "swizzled") {
      parts.push(", bits of the index ", element("code", {}, bitsOf(settings)), " with x := x XOR y");
    }
    const cover = `${plural(tile.instructions, "instruction")} cover${tile.instructions === 1 ? "s" : ""} the tile`;
    const ideal = tile.conflicts ? `, ${count(tile.ideal)} without conflicts` : "";
    return [...parts, `. ${cover} in ${plural(tile.wavefronts, "wavefront")}${ideal}.`];
  }

  function bankView(change) {
    const verdict = element("p", { class: "pg-verdict", role: "status" });
    const stats = statsOf({
      wavefronts: "wavefronts", ideal: "without conflicts", conflicts: "bank conflicts",
      tile: "conflicts, whole tile", bytes: "shared memory",
    });
    const summary = element("p", { class: "pg-layout" });
    const tile = figureOf("The tile, coloured by bank.", "Numbers are banks. Outlined: what one instruction reads.");
    const chart = figureOf(
      "The 32 banks over time.", "Each row is a wavefront; a label is the thread served. Grey banks are idle.",
    );
    const readout = element("p", { class: "pg-readout" }, NO_TEXT);
    let at = () => null;
    let settings;
    onPoint(tile.canvas, "pointermove", () => at, (row, col) => {
      readout.textContent = `row ${row}, column ${col}: bank ${banks.bankMap(settings)(row, col)}`;
    });
    onPoint(tile.canvas, "click", () => at, (row, col) => {
      change("instruction", banks.instructionAt(settings, row, col));
    });
    return {
      nodes: [verdict, stats.node, tile.node, readout, chart.node, summary],
      show(current) {
        settings = current;
        const result = banks.analyze(settings);
        const [kind, title, text] = verdictOf(result);
        verdict.dataset.kind = kind;
        verdict.replaceChildren(element("strong", {}, title), ` ${text}`);
        stats.node.hidden = chart.node.hidden = summary.hidden = Boolean(result.error);
        at = drawTile(tile.canvas, settings, result);
        tile.canvas.setAttribute("aria-label", `Tile of ${settings.rows} rows and ${settings.cols} columns by bank.`);
        const [begin, end] = rowsDrawn(settings, result);
        const areAll = end - begin === settings.rows;
        readout.textContent = areAll ? NO_TEXT : `Rows ${begin} to ${end - 1} of ${settings.rows}.`;
        if (result.error) return;
        const { wavefronts, ideal, conflicts, phases } = result.instruction;
        stats.show({
          wavefronts: count(wavefronts), ideal: count(ideal), conflicts: count(conflicts),
          tile: count(result.tile.conflicts), bytes: `${count(result.bytes)} B`,
        });
        summary.replaceChildren(...summaryOfTile(settings, result));
        drawWavefronts(chart.canvas, result);
        const ofPhases = phases.map((phase) => phase.wavefronts).join(", ");
        chart.canvas.setAttribute("aria-label", `Wavefronts of each phase: ${ofPhases}.`);
      },
    };
  }

  /** The bits of an index from high to low: e stay, x change, y are read. */
  function bitsOf({ B, M, S }) {
    let text = "";
    for (let bit = M + S + B - 1; bit >= 0; bit--) {
      if (B && (bit === M + B - 1 || bit === M + S - 1) && text) text += " ";
      if (bit === M - 1 && text) text += " ";
      text += bit < M ? "e" : bit < M + B ? "x" : bit >= M + S ? "y" : "·";
    }
    return text.replaceAll(/ +/g, " ");
  }

  const BLOCK_KINDS = {
    full: "Full: every pair is visible, so no mask is applied.",
    partial: "Partial: the mask is applied; visible pairs are darker.",
    empty: "Empty: skipped, its K and V are not loaded.",
  };

  function maskView() {
    const verdict = element("p", { class: "pg-verdict", role: "status" });
    const stats = statsOf({
      full: "full blocks", partial: "partial blocks", empty: "empty blocks", density: "blocks computed",
      visible: "visible pairs",
    });
    const picture = figureOf("Queries down, keys across.", "The grid shows blocks.");
    const items = Object.entries(BLOCK_KINDS).map(([kind, text]) => element("li", { "data-kind": kind }, text));
    const legend = element("ul", { class: "pg-legend" }, ...items);
    const readout = element("p", { class: "pg-readout" }, NO_TEXT);
    let at = () => null;
    let latest;
    onPoint(picture.canvas, "pointermove", () => at, (query, key) => {
      const { settings, result } = latest;
      const [m, n] = [Math.floor(query / settings.tileM), Math.floor(key / settings.tileN)];
      const [begin, end] = masks.visibleKeys(settings)(query);
      const pair = key >= begin && key < end ? "visible" : "masked";
      const block = ["empty", "partial", "full"][result.status[m][n]];
      readout.textContent = `query ${query}, key ${key}: ${pair}, ${block} block (${m}, ${n})`;
    });
    return {
      nodes: [verdict, stats.node, picture.node, readout, legend],
      show(settings) {
        const result = masks.analyze(settings);
        latest = { settings, result };
        stats.node.hidden = picture.node.hidden = readout.hidden = legend.hidden = Boolean(result.error);
        verdict.dataset.kind = result.error ? "error" : "good";
        if (result.error) {
          verdict.replaceChildren(element("strong", {}, "Not possible."), ` ${result.error}`);
          return;
        }
        const { blocks, empty, partial, full, density, saved, visible, pairs } = result;
        verdict.replaceChildren(
          element("strong", {}, `${percent(saved)} of the work is skipped.`),
          ` The kernel computes ${count(blocks - empty)} of ${plural(blocks, "block")} and applies the mask in ` +
            `${count(partial)}.`,
        );
        stats.show({
          full: count(full), partial: count(partial), empty: count(empty), density: percent(density),
          visible: percent(visible / pairs),
        });
        at = drawMask(picture.canvas, settings, result);
        readout.textContent = NO_TEXT;
        picture.canvas.setAttribute("aria-label", `Mask of ${settings.sq} queries and ${settings.sk} keys by block.`);
      },
    };
  }

  /** A new element size keeps the bytes that a swizzle moves as one. */
  function adjustBanks(before, change) {
    if (!("bytes" in change)) return change;
    return { ...change, M: Math.max(0, before.M + Math.log2(before.bytes / change.bytes)) };
  }

  // ---- The page

  const PANELS = {
    banks: {
      prefix: "banks", fields: BANK_FIELDS, defaults: BANK_DEFAULTS, presets: BANK_PRESETS, view: bankView,
      python: banks.pythonOf, adjust: adjustBanks,
    },
    masks: {
      prefix: "masks", fields: MASK_FIELDS, defaults: MASK_DEFAULTS, presets: MASK_PRESETS, view: maskView,
      python: masks.pythonOf, adjust: (_, change) => change,
    },
  };

  function start() {
    const panels = [];
    const links = () => { for (const panel of panels) panel.link.href = hashOf(panels, panel.prefix); };
    const onChange = (panel) => {
      links();
      history.replaceState(history.state, "", hashOf(panels, panel.prefix));
    };
    for (const [name, description] of Object.entries(PANELS)) {
      const root = document.getElementById(`playground-${name}`);
      if (root) panels.push(new Panel(root, description, onChange));
    }
    const read = () => {
      for (const panel of panels) {
        const settings = settingsOf(panel.prefix, panel.fields, panel.defaults, location.hash);
        panel.settings = settings;
        panel.show();
        if (new URLSearchParams(location.hash.slice(1)).get("panel") === panel.prefix) {
          panel.root.scrollIntoView({ block: "start" });
        }
      }
      links();
    };
    read();
    window.addEventListener("hashchange", () => { if (/[#&](banks|masks)\./.test(location.hash)) read(); });
    // Canvases follow the width and the colours of the page.
    const redraw = () => { for (const panel of panels) panel.view.show(panel.settings); };
    new MutationObserver(redraw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
    let width = 0;
    if (panels.length) {
      new ResizeObserver(([entry]) => {
        if (entry.contentRect.width !== width) redraw();
        width = entry.contentRect.width;
      }).observe(panels[0].root);
    }
  }

  /** The settings of all presets, for tests. */
  const presetsOf = ({ defaults, presets }) =>
    Object.values(presets).flat().map(({ changes }) => ({ ...defaults, ...changes }));
  window.playgroundPresets = { banks: presetsOf(PANELS.banks), masks: presetsOf(PANELS.masks) };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
