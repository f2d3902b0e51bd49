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

function store(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(name);
    localStorage.setItem(name, value);
  } catch {
    // A page from a file may have no storage.
  }
  return null;
}

// The theme: of the system, until the button chooses one.
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const theme = new Shared(store("moe-report-theme") ?? "system");

function isDark() {
  return theme.value === "system" ? systemDark.matches : theme.value === "dark";
}

function applyTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
}
theme.followers.add(applyTheme);
systemDark.addEventListener("change", () => theme.set(theme.value));
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
