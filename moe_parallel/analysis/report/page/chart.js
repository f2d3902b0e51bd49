// Curves: zoom by dragging, by the keyboard or with Ctrl and the wheel; values under the pointer.

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

/**
 * A card with curves.
 *
 * spec: {title, about, series(), xFormat(), xLabel(), yFormat, view, log, smoothing, references, thin, integers}
 *   series(): [{name, color, dash, x: [], y: []}], x ascending, y with null where not finite
 *   view: Shared [low, high] or null, the visible part of the x axis; charts may share it
 *   log, smoothing: Shared, optional; references: [{y, text}]; thin: many faint lines;
 *   integers: the x axis has whole numbers only
 */
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.name = typeof spec.title === "string" ? spec.title : spec.title.textContent.trim();
    this.view = spec.view ?? new Shared(null);
    this.svg = svg("svg", { tabindex: 0, role: "img" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.spoken = el("div", { class: "hidden-text", "aria-live": "polite" });
    this.plot = el("div", { class: "plot" }, this.svg, this.tip, this.spoken);
    this.cursor = null;
    this.details = unfolding("As a table", () => this.table());
    this.card = el("figure", { class: `card ${spec.class ?? ""}` },
      el("figcaption", {}, el("h3", {}, spec.title), spec.about ? el("p", { class: "about" }, spec.about) : null),
      this.plot, this.details);
    this.redraw = onDemand(this.plot, () => this.draw());
    for (const shared of [this.view, spec.log, spec.smoothing, ...(spec.follows ?? [])]) shared?.follow(() => this.changed());
    this.listen();
  }

  changed() {
    this.details.replaceChildren(this.details.firstElementChild);
    this.details.open = false;
    this.redraw();
  }

  /** The extent of the data on the x axis. */
  extent() {
    let low = Infinity;
    let high = -Infinity;
    for (const { x } of this.series) {
      if (!x.length) continue;
      low = Math.min(low, x[0]);
      high = Math.max(high, x[x.length - 1]);
    }
    this.only = low === high ? low : null; // the one place that has values
    if (!(low <= high)) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  draw() {
    this.series = this.spec.series().filter(({ x }) => x.length);
    this.card.hidden = !this.series.length;
    if (!this.series.length) return;
    this.full = this.extent();
    const [low, high] = this.view.value ?? this.full;
    this.width = Math.max(220, this.plot.clientWidth);
    this.inner = { left: MARGIN.left, right: this.width - MARGIN.right, top: MARGIN.top, bottom: CHART_HEIGHT - MARGIN.bottom };
    this.x = { low, high };
    this.lines = this.series.map((one) => ({ ...one, smooth: smoothed(one.y, this.spec.smoothing?.value ?? 0) }));
    this.scaleY();
    const clip = newId("clip");
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${CHART_HEIGHT}`);
    this.svg.setAttribute("aria-label", this.spokenSummary());
    this.cursorLine = svg("path", { class: "cursor", d: "" });
    this.dragged = svg("rect", { class: "drag", y: this.inner.top, height: this.inner.bottom - this.inner.top, width: 0 });
    this.svg.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", {
        x: this.inner.left - 3, y: this.inner.top - 4, width: this.inner.right - this.inner.left + 6, height: this.inner.bottom - this.inner.top + 8,
      })),
      svg("rect", { x: 0, y: 0, width: this.width, height: CHART_HEIGHT, fill: "transparent" }),
      ...this.axes(),
      svg("g", { "clip-path": `url(#${clip})` }, this.references(), this.lines.map((line) => this.curves(line)), this.dragged, this.cursorLine),
    );
  }

  scaleY() {
    let low = Infinity;
    let high = -Infinity;
    const logarithmic = Boolean(this.spec.log?.value);
    const smoothing = Boolean(this.spec.smoothing?.value);
    for (const { x, y, smooth } of this.lines) {
      const values = smoothing ? smooth : y;
      for (let place = 0; place < x.length; place += 1) {
        const value = values[place];
        if (value === null || x[place] < this.x.low || x[place] > this.x.high) continue;
        if (logarithmic && value <= 0) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    for (const { y } of this.spec.references?.() ?? []) {
      low = Math.min(low, y);
      high = Math.max(high, y);
    }
    if (!(low <= high)) [low, high] = logarithmic ? [1, 10] : [0, 1];
    if (logarithmic) {
      const room = (high / low) ** 0.05 || 1;
      this.y = { low: low / (room === 1 ? 1.2 : room), high: high * (room === 1 ? 1.2 : room), log: true };
      return;
    }
    const room = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    this.y = { low: low >= 0 ? Math.max(0, low - room) : low - room, high: high + room, log: false };
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
    const share = (pixel - this.inner.left) / (this.inner.right - this.inner.left);
    return this.x.low + Math.min(1, Math.max(0, share)) * (this.x.high - this.x.low);
  }

  axes() {
    const { left, right, top, bottom } = this.inner;
    const format = this.spec.xFormat();
    const parts = [];
    const ticksY = this.y.log ? logTicksOf(this.y.low, this.y.high, 5) : ticksOf(this.y.low, this.y.high, 5);
    for (const tick of ticksY) {
      const y = this.atY(tick);
      if (y < top - 1 || y > bottom + 1) continue;
      parts.push(svg("path", { class: "rule", d: `M${left} ${y.toFixed(1)}H${right}` }));
      parts.push(svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, (this.spec.yTick ?? this.spec.yFormat)(tick)));
    }
    for (const tick of this.ticksX()) {
      const x = this.atX(tick);
      parts.push(svg("path", { class: "axis", d: `M${x.toFixed(1)} ${bottom}v4` }));
      parts.push(svg("text", { x, y: bottom + 17, "text-anchor": x > right - 24 ? "end" : "middle" }, format(tick)));
    }
    parts.push(svg("path", { class: "axis", d: `M${left} ${bottom}H${right}` }));
    parts.push(svg("text", { x: (left + right) / 2, y: CHART_HEIGHT - 2, "text-anchor": "middle" }, this.spec.xLabel()));
    return parts;
  }

  ticksX() {
    if (this.only !== null) return [this.only];
    const ticks = ticksOf(this.x.low, this.x.high, Math.max(2, Math.floor((this.inner.right - this.inner.left) / 90)));
    return this.spec.integers ? ticks.filter(Number.isInteger) : ticks;
  }

  references() {
    return (this.spec.references?.() ?? []).map(({ y, text }) => {
      const at = this.atY(y);
      return [
        svg("path", { class: "reference", d: `M${this.inner.left} ${at}H${this.inner.right}` }),
        svg("text", { x: this.inner.right - 4, y: at - 5, "text-anchor": "end" }, text),
      ];
    });
  }

  curves({ x, y, smooth, color, dash }) {
    const smoothing = Boolean(this.spec.smoothing?.value) && x.length > 2;
    const style = { stroke: color, "stroke-dasharray": dash || null };
    const parts = [];
    if (smoothing) parts.push(svg("path", { class: "curve raw", d: this.path(x, y), stroke: color }));
    parts.push(svg("path", { class: this.spec.thin ? "curve many" : "curve", d: this.path(x, smoothing ? smooth : y), ...style }));
    if (x.length <= 25 && !this.spec.thin) {
      x.forEach((value, place) => {
        if (y[place] !== null) parts.push(svg("circle", { cx: this.atX(value), cy: this.atY((smoothing ? smooth : y)[place]), r: 2.4, fill: color }));
      });
    }
    x.forEach((value, place) => {
      if (y[place] !== null) return;
      const at = this.atX(value);
      const low = this.inner.bottom;
      parts.push(svg("path", { class: "gap", d: `M${at - 4} ${low - 8}l8 8m0 -8l-8 8`, stroke: color, "stroke-width": 2 }));
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
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch" || !this.x) return;
      begun = at(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      const here = at(event);
      if (begun !== null) {
        this.dragged.setAttribute("x", Math.max(this.inner.left, Math.min(begun, here)));
        this.dragged.setAttribute("width", Math.abs(here - begun));
      }
      this.read(this.valueAt(here), false);
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const [low, high] = [begun, at(event)].sort((one, other) => one - other).map((pixel) => this.valueAt(pixel));
      const far = Math.abs(at(event) - begun) > 6;
      begun = null;
      if (far) this.zoomTo(low, high);
    });
    this.svg.addEventListener("pointerleave", () => this.unread());
    this.svg.addEventListener("blur", () => this.unread());
    this.svg.addEventListener("dblclick", () => this.view.set(null));
    this.svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey || !this.x) return;
      event.preventDefault();
      this.zoomAround(this.valueAt(at(event)), event.deltaY > 0 ? 1.25 : 0.8);
    }, { passive: false });
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (!this.x || event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.x.high - this.x.low;
    const middle = this.cursor ?? (this.x.low + this.x.high) / 2;
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way && event.shiftKey) this.pan((way * span) / 5);
    else if (way) this.read(Math.min(this.x.high, Math.max(this.x.low, middle + (way * span) / 40)), true);
    else if (event.key === "Home") this.read(this.x.low, true);
    else if (event.key === "End") this.read(this.x.high, true);
    else if (event.key === "+" || event.key === "=") this.zoomAround(middle, 0.5);
    else if (event.key === "-") this.zoomAround(middle, 2);
    else if (event.key === "0" || event.key === "Escape") this.view.set(null);
    else return;
    event.preventDefault();
  }

  zoomAround(middle, factor) {
    this.zoomTo(middle - (middle - this.x.low) * factor, middle + (this.x.high - middle) * factor);
  }

  pan(by) {
    const [low, high] = this.full;
    const step = Math.max(low - this.x.low, Math.min(high - this.x.high, by));
    this.zoomTo(this.x.low + step, this.x.high + step);
  }

  zoomTo(low, high) {
    const [least, most] = this.full;
    const kept = [Math.max(least, low), Math.min(most, high)];
    if (kept[1] - kept[0] < (most - least) * 1e-4) return;
    const whole = kept[0] <= least && kept[1] >= most;
    this.view.set(whole ? null : kept);
  }

  /** Shows the values of all curves nearest to `value` of the x axis. */
  read(value, aloud) {
    value = this.only ?? value;
    this.cursor = value;
    const rows = this.lines
      .map((line) => ({ line, place: nearest(line.x, value) }))
      .map(({ line, place }) => ({ line, x: line.x[place], y: line.y[place] }))
      .sort((one, other) => (one.y ?? Infinity) - (other.y ?? Infinity));
    const head = `${this.spec.xLabel()} ${this.spec.xFormat()(value)}`;
    const listed = rows.slice(0, MOST_LISTED);
    this.tip.replaceChildren(el("div", { class: "quiet" }, head), el("ul", {}, listed.map(({ line, y }) =>
      el("li", {}, swatch(line), el("span", {}, line.name), el("b", {}, y === null ? "not finite" : this.spec.yFormat(y)))),
    rows.length > MOST_LISTED ? el("li", { class: "quiet" }, `and ${rows.length - MOST_LISTED} more`) : null));
    const at = this.atX(value);
    this.cursorLine.setAttribute("d", `M${at} ${this.inner.top}V${this.inner.bottom}`);
    this.tip.hidden = false;
    const left = at > this.width / 2;
    this.tip.style.left = left ? "auto" : `${at + 14}px`;
    this.tip.style.right = left ? `${this.width - at + 14}px` : "auto";
    this.tip.style.top = "0";
    if (aloud) this.spoken.textContent = `${head}: ${listed.map(({ line, y }) => `${line.name} ${y === null ? "not finite" : this.spec.yFormat(y)}`).join(", ")}`;
  }

  unread() {
    this.tip.hidden = true;
    this.cursorLine?.setAttribute("d", "");
  }

  spokenSummary() {
    const lines = this.series.slice(0, 8).map(({ name, x, y }) => {
      const ends = y.filter((value) => value !== null);
      if (!ends.length) return `${name}: no finite value`;
      return `${name}: from ${this.spec.yFormat(ends[0])} to ${this.spec.yFormat(ends[ends.length - 1])}`;
    });
    const more = this.series.length > 8 ? `; and ${this.series.length - 8} more` : "";
    return `${this.name}. Line chart over ${this.spec.xLabel()}. ${lines.join("; ")}${more}. Arrow keys read values, plus and minus zoom, 0 shows everything.`;
  }

  /** The text alternative: where each curve begins, its extremes, and where it ends. */
  table() {
    const format = this.spec.xFormat();
    const rows = this.spec.series().filter(({ x }) => x.length).map(({ name, x, y }) => {
      const places = y.map((value, place) => place).filter((place) => y[place] !== null);
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

/** The exponential moving average without values that are not finite. */
function smoothed(y, weight) {
  if (!weight) return y;
  let sum = 0;
  let total = 0;
  return y.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
