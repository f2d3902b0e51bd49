// Maps of numbers by row and column, with a cell that the pointer or the arrow keys select.

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
  lift: {
    light: [[0, 20, 95, 90], [0.25, 150, 205, 195], [0.5, 247, 247, 247], [0.75, 225, 175, 120], [1, 135, 70, 15]],
    dark: [[0, 110, 225, 210], [0.25, 35, 110, 105], [0.5, 34, 40, 49], [0.75, 150, 90, 35], [1, 255, 190, 110]],
  },
};

function colorOf(palette, share) {
  const stops = PALETTES[palette][isDark() ? "dark" : "light"];
  const place = Math.min(1, Math.max(0, share));
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
  const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((product, size) => product * size, 1));
  return {
    shape,
    top,
    get(...places) {
      const code = text.charCodeAt(places.reduce((sum, place, axis) => sum + place * strides[axis], 0));
      return code === 255 ? null : (code / 254) * top;
    },
  };
}

/**
 * A card with a map.
 *
 * spec: {title, about, palette, data(), rowLabel, columnLabel, format, follows, class}
 *   data(): {rows: [text], columns: [text], value(row, column), share(value), top}; null hides the card
 *   share: value -> place on the color scale, from 0 to 1
 */
class HeatMap {
  constructor(spec) {
    this.spec = spec;
    this.canvas = el("canvas", { tabindex: 0, role: "img" });
    this.reading = el("p", { class: "reading quiet", "aria-live": "polite" });
    this.box = el("div", { class: "map" }, this.canvas, this.reading);
    this.cell = null;
    this.heading = el("h3", {}, spec.title);
    this.about = el("p", { class: "about" });
    this.details = unfolding("As a table", () => this.table());
    this.card = el("figure", { class: `card ${spec.class ?? ""}` }, el("figcaption", {}, this.heading, this.about), this.box, this.details);
    this.redraw = onDemand(this.box, () => this.draw());
    for (const shared of spec.follows ?? []) shared.follow(() => this.changed());
    this.canvas.addEventListener("pointermove", (event) => this.select(this.under(event)));
    this.canvas.addEventListener("pointerleave", () => this.select(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  changed() {
    this.details.replaceChildren(this.details.firstElementChild);
    this.details.open = false;
    this.redraw();
  }

  draw() {
    const data = this.spec.data();
    this.card.hidden = !data;
    if (!data) return;
    this.data = data;
    this.about.textContent = (typeof this.spec.about === "function" ? this.spec.about() : this.spec.about) ?? "";
    const width = Math.max(180, this.box.clientWidth);
    const longest = Math.max(...data.rows.map((row) => row.length));
    const left = Math.min(110, 14 + 6.5 * longest);
    const cellWidth = (width - left - 2) / data.columns.length;
    const cellHeight = Math.max(3, Math.min(26, Math.max(cellWidth, 14), 380 / data.rows.length));
    const height = Math.round(cellHeight * data.rows.length + 34);
    this.frame = { left, top: 2, cellWidth, cellHeight, width, height };
    const ratio = Math.min(3, devicePixelRatio || 1);
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
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
    const gap = cellWidth > 6 && cellHeight > 6 ? 1 : 0;
    const numbered = cellWidth >= 32 && cellHeight >= 14;
    pen.textBaseline = "middle";
    for (let row = 0; row < rows.length; row += 1) {
      for (let column = 0; column < columns.length; column += 1) {
        const number = value(row, column);
        const x = left + column * cellWidth;
        const y = top + row * cellHeight;
        const rgb = number === null ? null : colorOf(this.spec.palette, share(number));
        pen.fillStyle = rgb ? `rgb(${rgb})` : cssColor("--line");
        pen.fillRect(x, y, cellWidth - gap + (gap ? 0 : 0.6), cellHeight - gap + (gap ? 0 : 0.6));
        if (numbered && rgb) {
          pen.fillStyle = inkOn(rgb);
          pen.textAlign = "center";
          pen.fillText((this.spec.short ?? this.spec.format)(number), x + cellWidth / 2, y + cellHeight / 2 + 0.5);
        }
      }
    }
    this.labels();
    if (this.cell) {
      pen.strokeStyle = cssColor("--focus");
      pen.lineWidth = 2.5;
      pen.strokeRect(left + this.cell[1] * cellWidth, top + this.cell[0] * cellHeight, cellWidth, cellHeight);
    }
  }

  labels() {
    const { left, top, cellWidth, cellHeight, width, height } = this.frame;
    const { rows, columns } = this.data;
    const pen = this.pen;
    pen.fillStyle = cssColor("--quiet");
    pen.textAlign = "right";
    const everyRow = Math.max(1, Math.ceil(13 / cellHeight));
    for (let row = 0; row < rows.length; row += everyRow) {
      pen.fillText(rows[row], left - 6, top + (row + 0.5) * cellHeight, left - 8);
    }
    pen.textAlign = "center";
    const wide = Math.max(...columns.map((column) => pen.measureText(column).width)) + 8;
    const everyColumn = Math.max(1, Math.ceil(wide / cellWidth));
    const y = top + rows.length * cellHeight + 9;
    for (let column = 0; column < columns.length; column += everyColumn) {
      pen.fillText(columns[column], left + (column + 0.5) * cellWidth, y);
    }
    pen.fillText(this.spec.columnLabel, left + (width - left) / 2, height - 7);
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
    if (!this.cell) {
      this.select([0, 0]);
      return;
    }
    const within = (value, count) => Math.min(count - 1, Math.max(0, value));
    this.select([within(this.cell[0] + step[0], this.data.rows.length), within(this.cell[1] + step[1], this.data.columns.length)]);
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

  cells() {
    const found = [];
    const { rows, columns, value } = this.data;
    rows.forEach((_, row) => columns.forEach((__, column) => {
      const number = value(row, column);
      if (number !== null) found.push({ row, column, number });
    }));
    return found;
  }

  summary() {
    const cells = this.cells();
    const size = `${this.data.rows.length} by ${this.data.columns.length}`;
    if (!cells.length) return `${this.heading.textContent}. Map of ${size} cells without values.`;
    const least = cells.reduce((best, cell) => (cell.number < best.number ? cell : best));
    const most = cells.reduce((best, cell) => (cell.number > best.number ? cell : best));
    return `${this.heading.textContent}. Map of ${size} cells. Lowest: ${this.textOf(least.row, least.column)}. ` +
      `Highest: ${this.textOf(most.row, most.column)}. Arrow keys read cells.`;
  }

  /** The text alternative; of a large map the cells with the largest and the smallest values. */
  table() {
    let cells = this.cells().sort((one, other) => other.number - one.number);
    const all = cells.length <= 2000;
    if (!all) cells = [...cells.slice(0, 200), ...cells.slice(-200)];
    const { rows, columns } = this.data;
    const caption = all ? this.heading.textContent : `${this.heading.textContent}: the 200 largest and the 200 smallest of ${whole(rows.length * columns.length)} values`;
    return el("div", {}, all ? null : el("p", { class: "quiet" }, caption), sortableTable([
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
