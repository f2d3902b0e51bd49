// Elements, the shared state of the page, and drawing on demand.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Strings among the children become text; nothing is ever parsed as HTML. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

let lastId = 0;
function newId(stem) {
  lastId += 1;
  return `${stem}-${lastId}`;
}

/** A value that others follow. */
class Shared {
  constructor(value) {
    this.value = value;
    this.followers = new Set();
  }

  set(value) {
    this.value = value;
    for (const follow of this.followers) follow(value);
  }

  follow(callback) {
    this.followers.add(callback);
    return callback;
  }
}

const waiting = new Map();
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      const state = waiting.get(entry.target);
      state.near = true;
      if (state.stale) state.draw();
    }
    for (const entry of entries) {
      if (!entry.isIntersecting && waiting.has(entry.target)) waiting.get(entry.target).near = false;
    }
  },
  { rootMargin: "300px" },
);

/** Draws `node` when it is near the visible part of the page. Returns the function that redraws it. */
function onDemand(node, draw) {
  const state = { near: false, stale: true, draw: null };
  state.draw = () => {
    state.stale = false;
    draw();
  };
  waiting.set(node, state);
  seen.observe(node);
  let width = 0;
  new ResizeObserver(() => {
    if (node.clientWidth === width) return;
    width = node.clientWidth;
    redraw();
  }).observe(node);
  function redraw() {
    state.stale = true;
    if (state.near) requestAnimationFrame(() => state.stale && state.draw());
  }
  theme.follow(redraw);
  return redraw;
}

/** Draws everything, for a printer. */
function drawAll() {
  for (const state of waiting.values()) if (state.stale) state.draw();
}

// The theme: of the system, until the button chooses the other one.
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const theme = new Shared(systemDark.matches ? "dark" : "light");
const isDark = () => theme.value === "dark";
const applyTheme = theme.follow(() => { document.documentElement.dataset.theme = theme.value; });
systemDark.addEventListener("change", () => theme.set(systemDark.matches ? "dark" : "light"));
applyTheme();

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function labeled(text, control, ...more) {
  return el("label", {}, text, control, ...more);
}

/** A choice from a list. `options`: [value, text] pairs. */
function selectOf(label, options, shared) {
  const select = el(
    "select",
    { onchange: () => shared.set(select.value) },
    options.map(([value, text]) => el("option", { value, selected: value === shared.value }, text)),
  );
  return labeled(label, select);
}

/** A slider over the places 0 to count - 1. `text`: place -> what is shown next to it. */
function sliderOf(label, count, shared, text) {
  const shown = el("output", {}, text(shared.value));
  const input = el("input", {
    type: "range", min: 0, max: Math.max(0, count - 1), step: 1, value: shared.value,
    "aria-valuetext": text(shared.value),
    oninput: () => shared.set(Number(input.value)),
  });
  shared.follow((value) => {
    input.value = value;
    shown.textContent = text(value);
    input.setAttribute("aria-valuetext", text(value));
  });
  return labeled(label, input, shown);
}

/** A section with its heading; the navigation lists it. */
function section(id, heading, intro, ...children) {
  return el(
    "section",
    { id, "aria-labeledby": `${id}-heading` },
    el("h2", { id: `${id}-heading` }, heading),
    intro ? el("p", { class: "intro quiet" }, intro) : null,
    ...children,
  );
}

// Numbers as text, and the ticks of an axis.

const MINUS = "\u2212";
const NONE = "\u2013";

/** A number with about `digits` significant digits. */
function significant(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    const [mantissa, power] = value.toExponential(Math.max(0, digits - 2)).split("e");
    return `${mantissa.replace("-", MINUS)}e${power.replace("+", "").replace("-", MINUS)}`;
  }
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  const text = size.toLocaleString("en-US", { maximumFractionDigits: places, minimumFractionDigits: Math.min(places, 3) });
  return (value < 0 ? MINUS : "") + text;
}

function fixed(value, places) {
  if (value === null || value === undefined) return NONE;
  const text = Math.abs(value).toLocaleString("en-US", { maximumFractionDigits: places, minimumFractionDigits: places });
  return (value < 0 ? MINUS : "") + text;
}

function whole(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

function percent(value, places = 1) {
  if (value === null || value === undefined) return NONE;
  if (value > 0 && value < 0.5 * 10 ** (-places - 2)) return `< ${fixed(10 ** -places, places)}%`;
  return `${fixed(100 * value, places)}%`;
}

const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];

/** 1,234,000 as 1.23M. */
function compact(value) {
  if (value === null || value === undefined) return NONE;
  const [unit, name] = UNITS.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  const scaled = value / unit;
  return `${scaled.toLocaleString("en-US", { maximumSignificantDigits: 3 })}${name}`;
}

function bytes(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 2 ** 30 ? `${fixed(value / 2 ** 30, 2)} GiB` : `${fixed(value / 2 ** 20, 0)} MiB`;
}

function hours(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1) return `${significant(value, 3)} h`;
  return value >= 1 / 60 ? `${significant(value * 60, 3)} min` : `${significant(value * 3600, 3)} s`;
}

/** Round places for about `count` ticks from `low` to `high`. */
function ticksOf(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) ?? 10);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9; tick += 1) {
    ticks.push(Number((tick * step).toPrecision(12)));
  }
  return ticks;
}

/** Ticks of a logarithmic axis: powers of ten, or round numbers where there are few of those. */
function logTicksOf(low, high, count) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of [1, 2, 3, 5]) ticks.push(factor * 10 ** power);
  }
  const within = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  if (within.length < 2) return ticksOf(low, high, count);
  const tens = within.filter((tick) => Number.isInteger(Math.log10(tick)));
  return within.length > 2 * count && tens.length > 1 ? tens : within;
}

// Tables that sort by any column, with the pointer or the keyboard.

/**
 * columns: {name, value(row), show(row) (default: the value as text), number, title}
 * The first column heads each row. `start`: {column, descending}, the order at the beginning.
 */
function sortableTable(columns, rows, { caption, start = null, tall = false } = {}) {
  const body = el("tbody");
  const state = { column: start?.column ?? null, descending: start?.descending ?? false };
  const heads = columns.map((column, place) =>
    el(
      "th",
      { scope: "col", class: column.number ? "number" : null, title: column.title },
      el("button", { type: "button", class: "plain", onclick: () => sortBy(place) }, column.name),
    ),
  );

  function sortBy(place) {
    if (state.column === place) state.descending = !state.descending;
    else Object.assign(state, { column: place, descending: false });
    fill();
  }

  function fill() {
    heads.forEach((head, place) => {
      if (place === state.column) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...ordered().map(lineOf));
  }

  function ordered() {
    if (state.column === null) return rows;
    const { value } = columns[state.column];
    const sign = state.descending ? -1 : 1;
    return [...rows].sort((one, other) => compare(value(one), value(other), sign));
  }

  function lineOf(row) {
    return el("tr", {}, columns.map((column, place) => {
      const value = column.value(row);
      const shown = column.show ? column.show(row) : value ?? NONE;
      const attributes = { class: column.number ? "number" : null };
      if (place === 0) return el("th", { scope: "row", ...attributes }, shown);
      return el("td", attributes, shown);
    }));
  }

  fill();
  const label = caption ? { "aria-label": caption } : {};
  return el(
    "div",
    { class: tall ? "scroll tall" : "scroll", tabindex: 0, role: "region", ...label },
    el("table", {}, caption ? el("caption", { class: "hidden-text" }, caption) : null,
      el("thead", {}, el("tr", {}, heads)), body),
  );
}

/** Missing values come last in either order. */
function compare(one, other, sign) {
  const missing = (value) => value === null || value === undefined;
  if (missing(one) || missing(other)) return Number(missing(one)) - Number(missing(other));
  if (typeof one === "number" && typeof other === "number") return sign * (one - other);
  return sign * String(one).localeCompare(String(other), "en", { numeric: true });
}

/** A closed <details> whose content is built when it is first opened. */
function unfolding(text, build) {
  const details = el("details", {
    ontoggle: () => {
      if (details.open && details.childElementCount === 1) details.append(build());
    },
  }, el("summary", {}, text));
  return details;
}
