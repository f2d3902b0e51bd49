// Curves and maps of numbers, read by the pointer or the keyboard, each with its numbers as a table.

const MARGIN = { left: 56, right: 14, top: 10, bottom: 34 };
const CHART_HEIGHT = 250;
const MOST_LISTED = 12;
const DASHES = ["", "7 4", "2 3"];

/** The color and the dashes of a run or another series by its place, the same everywhere. */
function styleOf(place) {
  return { color: `var(--s${place % 7})`, dash: DASHES[Math.floor(place / 7) % DASHES.length] };
}

function swatch(style) {
  return svg("svg", { class: "swatch", viewBox: "0 0 26 14", "aria-hidden": "true" },
    svg("path", { d: "M1 7H25", stroke: style.color, "stroke-dasharray": style.dash || null }));
}

const clamped = (value, low, high) => Math.min(high, Math.max(low, value));

/** A card with a title, what it is about (text, or a function of the state), a drawing, and its table. */
class Card {
  constructor(spec, box, follows) {
    this.spec = spec;
    this.name = typeof spec.title === "string" ? spec.title : spec.title.textContent.trim();
    this.box = box;
    this.about = el("p", { class: "about" }, typeof spec.about === "string" ? spec.about : null);
    this.details = unfolding("As a table", () => this.table());
    this.card = el("figure", { class: `card ${spec.class ?? ""}` },
      el("figcaption", {}, el("h3", {}, spec.title), spec.about ? this.about : null), box, this.details);
    const redraw = onDemand(box, () => {
      if (typeof spec.about === "function") this.about.textContent = spec.about();
      this.draw();
    });
    for (const shared of follows.filter(Boolean)) {
      shared.follow(() => {
        this.details.replaceChildren(this.details.firstElementChild);
        this.details.open = false;
        redraw();
      });
    }
  }
}

/**
 * Curves: zoom by dragging or by the keyboard; values under the pointer.
 *
 * spec: {title, about, series(), xFormat(), xLabel(), yFormat, view, log, smoothing, references, thin, integers}
 *   series(): [{name, color, dash, x: [], y: []}], x ascending, y with null where not finite
 *   view: Shared [low, high] or null, the visible part of the x axis; charts may share it
 *   log, smoothing: Shared, optional; references: [{y, text}]; thin: many faint lines;
 *   integers: the x axis has whole numbers only
 */
class Chart extends Card {
  constructor(spec) {
    const view = spec.view ?? new Shared(null);
    const drawing = svg("svg", { tabindex: 0, role: "img" });
    const tip = el("div", { class: "tip", hidden: true });
    const spoken = el("div", { class: "hidden-text", "aria-live": "polite" });
    super(spec, el("div", { class: "plot" }, drawing, tip, spoken), [view, spec.log, spec.smoothing, ...(spec.follows ?? [])]);
    Object.assign(this, { view, svg: drawing, tip, spoken, cursor: null });
    this.listen();
  }

  draw() {
    const series = this.spec.series().filter(({ x }) => x.length);
    this.card.hidden = !series.length;
    if (!series.length) return;
    const ends = series.map(({ x }) => [x[0], x[x.length - 1]]);
    const [least, most] = [Math.min(...ends.map(([low]) => low)), Math.max(...ends.map(([, high]) => high))];
    this.only = least === most ? least : null; // the one place that has values
    this.full = least === most ? [least - 0.5, most + 0.5] : [least, most];
    const [low, high] = this.view.value ?? this.full;
    this.x = { low, high };
    this.width = Math.max(220, this.box.clientWidth);
    this.inner = { left: MARGIN.left, right: this.width - MARGIN.right, top: MARGIN.top, bottom: CHART_HEIGHT - MARGIN.bottom };
    // `smooth` is drawn; it is y itself without smoothing.
    this.lines = series.map((one) => ({ ...one, smooth: smoothed(one.y, this.spec.smoothing?.value ?? 0) }));
    this.scaleY();
    const { left, right, top, bottom } = this.inner;
    const clip = newId("clip");
    this.cursorLine = svg("path", { class: "cursor", d: "" });
    this.dragged = svg("rect", { class: "drag", y: top, height: bottom - top, width: 0 });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${CHART_HEIGHT}`);
    this.svg.setAttribute("aria-label", this.summary());
    this.svg.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", { x: left - 3, y: top - 4, width: right - left + 6, height: bottom - top + 8 })),
      svg("rect", { x: 0, y: 0, width: this.width, height: CHART_HEIGHT, fill: "transparent" }),
      ...this.axes(),
      svg("g", { "clip-path": `url(#${clip})` }, this.references(), this.lines.map((line) => this.curves(line)), this.dragged, this.cursorLine),
    );
  }

  scaleY() {
    const log = Boolean(this.spec.log?.value);
    const seen = (this.spec.references?.() ?? []).map(({ y }) => y);
    for (const { x, smooth } of this.lines) {
      for (let place = 0; place < x.length; place += 1) {
        const value = smooth[place];
        if (value !== null && x[place] >= this.x.low && x[place] <= this.x.high && !(log && value <= 0)) seen.push(value);
      }
    }
    let [low, high] = log ? [1, 10] : [0, 1];
    if (seen.length) [low, high] = [seen.reduce((one, other) => Math.min(one, other)), seen.reduce((one, other) => Math.max(one, other))];
    if (log) {
      const room = high > low ? (high / low) ** 0.05 : 1.2;
      this.y = { low: low / room, high: high * room, log };
    } else {
      const room = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
      this.y = { low: low >= 0 ? Math.max(0, low - room) : low - room, high: high + room, log };
    }
  }

  atX(value) {
    return this.inner.left + ((value - this.x.low) / (this.x.high - this.x.low)) * (this.inner.right - this.inner.left);
  }

  atY(value) {
    const { low, high, log } = this.y;
    const share = log ? Math.log(Math.max(value, 1e-300) / low) / Math.log(high / low) : (value - low) / (high - low);
    return this.inner.bottom - share * (this.inner.bottom - this.inner.top);
  }

  valueAt(pixel) {
    const share = clamped((pixel - this.inner.left) / (this.inner.right - this.inner.left), 0, 1);
    return this.x.low + share * (this.x.high - this.x.low);
  }

  axes() {
    const { left, right, top, bottom } = this.inner;
    const parts = [];
    for (const tick of this.y.log ? logTicksOf(this.y.low, this.y.high, 5) : ticksOf(this.y.low, this.y.high, 5)) {
      const y = this.atY(tick);
      if (y < top - 1 || y > bottom + 1) continue;
      parts.push(svg("path", { class: "rule", d: `M${left} ${y.toFixed(1)}H${right}` }),
        svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, (this.spec.yTick ?? this.spec.yFormat)(tick)));
    }
    const number = Math.max(2, Math.floor((right - left) / 90));
    const ticks = this.only === null ? ticksOf(this.x.low, this.x.high, number) : [this.only];
    for (const tick of this.spec.integers ? ticks.filter(Number.isInteger) : ticks) {
      const x = this.atX(tick);
      parts.push(svg("path", { class: "axis", d: `M${x.toFixed(1)} ${bottom}v4` }),
        svg("text", { x, y: bottom + 17, "text-anchor": x > right - 24 ? "end" : "middle" }, this.spec.xFormat()(tick)));
    }
    parts.push(svg("path", { class: "axis", d: `M${left} ${bottom}H${right}` }),
      svg("text", { x: (left + right) / 2, y: CHART_HEIGHT - 2, "text-anchor": "middle" }, this.spec.xLabel()));
    return parts;
  }

  references() {
    return (this.spec.references?.() ?? []).map(({ y, text }) => [
      svg("path", { class: "reference", d: `M${this.inner.left} ${this.atY(y)}H${this.inner.right}` }),
      svg("text", { x: this.inner.right - 4, y: this.atY(y) - 5, "text-anchor": "end" }, text),
    ]);
  }

  curves({ x, y, smooth, color, dash }) {
    const { thin } = this.spec;
    const parts = [];
    if (smooth !== y) parts.push(svg("path", { class: "curve raw", d: this.path(x, y), stroke: color }));
    parts.push(svg("path", { class: thin ? "curve many" : "curve", d: this.path(x, smooth), stroke: color, "stroke-dasharray": dash || null }));
    x.forEach((value, place) => {
      const at = this.atX(value);
      if (y[place] === null) {
        parts.push(svg("path", { class: "gap", d: `M${at - 4} ${this.inner.bottom - 8}l8 8m0 -8l-8 8`, stroke: color, "stroke-width": 2 }));
      } else if (x.length <= 25 && !thin) {
        parts.push(svg("circle", { cx: at, cy: this.atY(smooth[place]), r: 2.4, fill: color }));
      }
    });
    return parts;
  }

  path(x, y) {
    let pen = "M";
    let found = "";
    for (let place = 0; place < x.length; place += 1) {
      if (y[place] === null || (this.y.log && y[place] <= 0)) {
        pen = "M";
        continue;
      }
      if ((x[place + 1] ?? x[place]) < this.x.low || (x[place - 1] ?? x[place]) > this.x.high) continue;
      found += `${pen}${this.atX(x[place]).toFixed(1)} ${this.atY(y[place]).toFixed(1)}`;
      pen = "L";
    }
    return found;
  }

  listen() {
    let begun = null;
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      return ((event.clientX - box.left) / box.width) * this.width;
    };
    const on = (name, act, options) => this.svg.addEventListener(name, act, options);
    on("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch" || !this.x) return;
      begun = at(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    on("pointermove", (event) => {
      if (!this.x) return;
      const here = at(event);
      if (begun !== null) {
        this.dragged.setAttribute("x", Math.max(this.inner.left, Math.min(begun, here)));
        this.dragged.setAttribute("width", Math.abs(here - begun));
      }
      this.read(this.valueAt(here), false);
    });
    on("pointerup", (event) => {
      if (begun === null) return;
      const [low, high] = [begun, at(event)].sort((one, other) => one - other);
      begun = null;
      if (high - low > 6) this.zoomTo(this.valueAt(low), this.valueAt(high));
    });
    for (const name of ["pointerleave", "blur"]) {
      on(name, () => {
        this.tip.hidden = true;
        this.cursorLine?.setAttribute("d", "");
      });
    }
    on("dblclick", () => this.view.set(null));
    on("keydown", (event) => this.key(event));
  }

  key(event) {
    if (!this.x || event.ctrlKey || event.metaKey || event.altKey) return;
    const { low, high } = this.x;
    const middle = this.cursor ?? (low + high) / 2;
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way && event.shiftKey) {
      const step = clamped((way * (high - low)) / 5, this.full[0] - low, this.full[1] - high);
      this.zoomTo(low + step, high + step);
    } else if (way) this.read(clamped(middle + (way * (high - low)) / 40, low, high), true);
    else if (event.key === "Home") this.read(low, true);
    else if (event.key === "End") this.read(high, true);
    else if (event.key === "+" || event.key === "=") this.zoomAround(middle, 0.5);
    else if (event.key === "-") this.zoomAround(middle, 2);
    else if (event.key === "0" || event.key === "Escape") this.view.set(null);
    else return;
    event.preventDefault();
  }

  zoomAround(middle, factor) {
    this.zoomTo(middle - (middle - this.x.low) * factor, middle + (this.x.high - middle) * factor);
  }

  zoomTo(low, high) {
    const [least, most] = this.full;
    const kept = [Math.max(least, low), Math.min(most, high)];
    if (kept[1] - kept[0] < (most - least) * 1e-4) return;
    this.view.set(kept[0] <= least && kept[1] >= most ? null : kept);
  }

  /** Shows the values of all curves nearest to `value` of the x axis. */
  read(value, aloud) {
    value = this.only ?? value;
    this.cursor = value;
    const told = (y) => (y === null ? "not finite" : this.spec.yFormat(y));
    const rows = this.lines.map((line) => ({ line, y: line.y[nearest(line.x, value)] }))
      .sort((one, other) => (one.y ?? Infinity) - (other.y ?? Infinity));
    const head = `${this.spec.xLabel()} ${this.spec.xFormat()(value)}`;
    const listed = rows.slice(0, MOST_LISTED);
    this.tip.replaceChildren(el("div", { class: "quiet" }, head), el("ul", {},
      listed.map(({ line, y }) => el("li", {}, swatch(line), el("span", {}, line.name), el("b", {}, told(y)))),
      rows.length > MOST_LISTED ? el("li", { class: "quiet" }, `and ${rows.length - MOST_LISTED} more`) : null));
    const at = this.atX(value);
    const left = at > this.width / 2;
    this.cursorLine.setAttribute("d", `M${at} ${this.inner.top}V${this.inner.bottom}`);
    this.tip.hidden = false;
    Object.assign(this.tip.style, { left: left ? "auto" : `${at + 14}px`, right: left ? `${this.width - at + 14}px` : "auto", top: "0" });
    if (aloud) this.spoken.textContent = `${head}: ${listed.map(({ line, y }) => `${line.name} ${told(y)}`).join(", ")}`;
  }

  summary() {
    const lines = this.lines.slice(0, 8).map(({ name, y }) => {
      const ends = y.filter((value) => value !== null);
      return ends.length ? `${name}: from ${this.spec.yFormat(ends[0])} to ${this.spec.yFormat(ends[ends.length - 1])}` : `${name}: no finite value`;
    });
    const more = this.lines.length > 8 ? `; and ${this.lines.length - 8} more` : "";
    return `${this.name}. Line chart over ${this.spec.xLabel()}. ${lines.join("; ")}${more}. Arrow keys read values, plus and minus zoom, 0 shows everything.`;
  }

  /** The text alternative: where each curve begins, its extremes, and where it ends. */
  table() {
    const format = this.spec.xFormat();
    const rows = this.spec.series().filter(({ x }) => x.length).map(({ name, x, y }) => {
      const places = [...y.keys()].filter((place) => y[place] !== null);
      const by = (better) => places.reduce((best, place) => (better(y[place], y[best]) ? place : best), places[0]);
      const [low, high] = [by((one, best) => one < best), by((one, best) => one > best)];
      return { name, first: y[places[0]], low: y[low], lowAt: x[low], high: y[high], highAt: x[high], last: y[places[places.length - 1]] };
    });
    const number = (name, key) => ({ name, number: true, value: (row) => row[key], show: (row) => this.spec.yFormat(row[key]) });
    const where = (name, key) => ({ name, number: true, value: (row) => row[key], show: (row) => (row[key] === undefined ? NONE : format(row[key])) });
    return sortableTable([
      { name: "curve", value: (row) => row.name }, number("first", "first"), number("lowest", "low"), where("at", "lowAt"),
      number("highest", "high"), where("at", "highAt"), number("last", "last"),
    ], rows, { caption: this.name, tall: true });
  }
}

/** The place in ascending x that is nearest to the value. */
function nearest(x, value) {
  let low = 0;
  let high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= value) low = middle;
    else high = middle;
  }
  return value - x[low] <= x[high] - value ? low : high;
}

/** The exponential moving average without values that are not finite; of few values, the values. */
function smoothed(y, weight) {
  if (!weight || y.length < 3) return y;
  let sum = 0;
  let total = 0;
  return y.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Stops of a color scale, [place from 0 to 1, red, green, blue], for light and dark. */
const PALETTES = {
  load: {
    light: [[0, 84, 39, 136], [0.15, 153, 142, 195], [0.25, 247, 247, 247], [0.5, 241, 163, 64], [1, 140, 64, 6]],
    dark: [[0, 168, 140, 255], [0.15, 96, 78, 170], [0.25, 34, 40, 49], [0.5, 196, 110, 20], [1, 255, 190, 100]],
  },
  plain: {
    light: [[0, 250, 251, 253], [0.25, 190, 215, 238], [0.6, 66, 133, 190], [1, 8, 48, 107]],
    dark: [[0, 23, 28, 35], [0.3, 26, 66, 110], [0.65, 62, 140, 205], [1, 205, 232, 255]],
  },
};

function colorOf(palette, share) {
  const stops = PALETTES[palette][isDark() ? "dark" : "light"];
  const place = clamped(share, 0, 1);
  const after = Math.max(1, stops.findIndex(([at]) => at >= place));
  const [low, high] = [stops[after - 1], stops[after]];
  const part = (place - low[0]) / (high[0] - low[0]);
  return [1, 2, 3].map((channel) => Math.round(low[channel] + part * (high[channel] - low[channel])));
}

/** Black or white text, whichever has the higher contrast (WCAG) on a color. */
function inkOn(rgb) {
  const [red, green, blue] = rgb.map((value) => (value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

/** Values from the bytes of the page: get(places...) gives a number, or null for no value. */
function decoded({ shape, top, data }) {
  const text = atob(data);
  const get = (...places) => {
    const code = text.charCodeAt(places.reduce((sum, place, axis) => sum * shape[axis] + place, 0));
    return code === 255 ? null : (code / 254) * top;
  };
  return { shape, top, get };
}

/**
 * A map of numbers by row and column, with a cell that the pointer or the arrow keys select.
 *
 * spec: {title, about, palette, data(), rowLabel, columnLabel, valueLabel, format, short, follows, class}
 *   data(): {rows: [text], columns: [text], value(row, column), share(value)}; null hides the card
 *   share: value -> place on the color scale, from 0 to 1
 */
class HeatMap extends Card {
  constructor(spec) {
    const canvas = el("canvas", { tabindex: 0, role: "img" });
    const reading = el("p", { class: "reading quiet", "aria-live": "polite" });
    super(spec, el("div", { class: "map" }, canvas, reading), spec.follows ?? []);
    Object.assign(this, { canvas, reading, cell: null });
    canvas.addEventListener("pointermove", (event) => this.select(this.under(event)));
    canvas.addEventListener("pointerleave", () => this.select(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  draw() {
    const data = this.spec.data();
    this.card.hidden = !data;
    if (!data) return;
    this.data = data;
    const { rows, columns } = data;
    const width = Math.max(180, this.box.clientWidth);
    const left = Math.min(110, 14 + 6.5 * Math.max(...rows.map((row) => row.length)));
    const cellWidth = (width - left - 2) / columns.length;
    const cellHeight = Math.max(3, Math.min(26, Math.max(cellWidth, 14), 380 / rows.length));
    const height = Math.round(cellHeight * rows.length + 34);
    this.frame = { left, top: 2, cellWidth, cellHeight, width, height };
    const ratio = Math.min(3, devicePixelRatio || 1);
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    this.canvas.style.height = `${height}px`;
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.paint();
    this.canvas.setAttribute("aria-label", this.summary());
  }

  paint() {
    const { left, top, cellWidth, cellHeight, width, height } = this.frame;
    const { rows, columns, value, share } = this.data;
    const pen = this.pen;
    pen.clearRect(0, 0, width, height);
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    const gap = cellWidth > 6 && cellHeight > 6 ? 1 : -0.6; // small cells overlap a little: no seams
    const numbered = cellWidth >= 32 && cellHeight >= 14;
    for (let row = 0; row < rows.length; row += 1) {
      for (let column = 0; column < columns.length; column += 1) {
        const number = value(row, column);
        const [x, y] = [left + column * cellWidth, top + row * cellHeight];
        const rgb = number === null ? null : colorOf(this.spec.palette, share(number));
        pen.fillStyle = rgb ? `rgb(${rgb})` : cssColor("--line");
        pen.fillRect(x, y, cellWidth - gap, cellHeight - gap);
        if (numbered && rgb) {
          pen.fillStyle = inkOn(rgb);
          pen.fillText((this.spec.short ?? this.spec.format)(number), x + cellWidth / 2, y + cellHeight / 2 + 0.5);
        }
      }
    }
    pen.fillStyle = cssColor("--quiet");
    const wide = Math.max(...columns.map((column) => pen.measureText(column).width)) + 8;
    const everyColumn = Math.max(1, Math.ceil(wide / cellWidth));
    for (let column = 0; column < columns.length; column += everyColumn) {
      pen.fillText(columns[column], left + (column + 0.5) * cellWidth, top + rows.length * cellHeight + 9);
    }
    pen.fillText(this.spec.columnLabel, left + (width - left) / 2, height - 7);
    pen.textAlign = "right";
    const everyRow = Math.max(1, Math.ceil(13 / cellHeight));
    for (let row = 0; row < rows.length; row += everyRow) {
      pen.fillText(rows[row], left - 6, top + (row + 0.5) * cellHeight, left - 8);
    }
    if (this.cell) {
      pen.strokeStyle = cssColor("--focus");
      pen.lineWidth = 2.5;
      pen.strokeRect(left + this.cell[1] * cellWidth, top + this.cell[0] * cellHeight, cellWidth, cellHeight);
    }
  }

  under(event) {
    if (!this.frame) return null;
    const box = this.canvas.getBoundingClientRect();
    const { left, top, cellWidth, cellHeight } = this.frame;
    const column = Math.floor((event.clientX - box.left - left) / cellWidth);
    const row = Math.floor((event.clientY - box.top - top) / cellHeight);
    const inside = row >= 0 && column >= 0 && row < this.data.rows.length && column < this.data.columns.length;
    return inside ? [row, column] : null;
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.data) return;
    event.preventDefault();
    const counts = [this.data.rows.length, this.data.columns.length];
    this.select(this.cell ? this.cell.map((at, axis) => clamped(at + step[axis], 0, counts[axis] - 1)) : [0, 0]);
  }

  select(cell) {
    if (!this.data || String(cell) === String(this.cell)) return;
    this.cell = cell;
    this.paint();
    this.reading.textContent = cell ? this.textOf(...cell) : "";
  }

  textOf(row, column) {
    const { rows, columns, value } = this.data;
    const number = value(row, column);
    const shown = number === null ? "no value" : this.spec.format(number);
    return `${this.spec.rowLabel} ${rows[row]}, ${this.spec.columnLabel} ${columns[column]}: ${shown}`;
  }

  /** The cells with a value, the largest first. */
  cells() {
    const { rows, columns, value } = this.data;
    const all = rows.flatMap((_, row) => columns.map((__, column) => ({ row, column, number: value(row, column) })));
    return all.filter(({ number }) => number !== null).sort((one, other) => other.number - one.number);
  }

  summary() {
    const cells = this.cells();
    const size = `${this.data.rows.length} by ${this.data.columns.length}`;
    if (!cells.length) return `${this.name}. Map of ${size} cells without values.`;
    const [most, least] = [cells[0], cells[cells.length - 1]];
    return `${this.name}. Map of ${size} cells. Lowest: ${this.textOf(least.row, least.column)}. ` +
      `Highest: ${this.textOf(most.row, most.column)}. Arrow keys read cells.`;
  }

  /** The text alternative; of a large map the cells with the largest and the smallest values. */
  table() {
    let cells = this.cells();
    const { rows, columns } = this.data;
    let caption = this.name;
    if (cells.length > 2000) {
      cells = [...cells.slice(0, 200), ...cells.slice(-200)];
      caption += `: the 200 largest and the 200 smallest of ${whole(rows.length * columns.length)} values`;
    }
    return el("div", {}, caption === this.name ? null : el("p", { class: "quiet" }, caption), sortableTable([
      { name: this.spec.rowLabel, value: ({ row }) => row, show: ({ row }) => rows[row] },
      { name: this.spec.columnLabel, value: ({ column }) => column, show: ({ column }) => columns[column] },
      { name: this.spec.valueLabel ?? "value", number: true, value: ({ number }) => number, show: ({ number }) => this.spec.format(number) },
    ], cells, { caption, tall: true }));
  }
}

/** The legend of a color scale: texts at its two ends. */
function scaleLegend(palette, low, high, about) {
  const canvas = el("canvas", { width: 140, height: 1, "aria-hidden": "true" });
  const paint = () => {
    const pen = canvas.getContext("2d");
    for (let x = 0; x < 140; x += 1) {
      pen.fillStyle = `rgb(${colorOf(palette, x / 139)})`;
      pen.fillRect(x, 0, 1, 1);
    }
  };
  theme.follow(paint);
  paint();
  return el("div", { class: "scale" }, el("span", {}, low), canvas, el("span", {}, high), about ? el("span", {}, about) : null);
}
