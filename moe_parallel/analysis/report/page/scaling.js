// Scaling studies.

const PHASES = ["compute", "data", "dispatch", "pipeline", "reduce", "rest", "save", "between"];

function scalingSection(studies) {
  if (!studies.length) return null;
  return section("scaling", "Scaling", "Means over the logged steps after the warm-up. The dotted line is ideal: the speed of the smallest cell times the nodes.",
    studies.map(({ name, rows }) => {
      const known = new Set(["nodes", "ranks", "global_batch_size", "tokens_per_second", "efficiency", "step_seconds",
        "planned_tokens_per_second", "plan_error", "axis", ...PHASES.map((phase) => `${phase}_seconds`)]);
      const varied = Object.keys(rows[0]).filter((key) => !known.has(key));
      const axis = rows[0].axis ?? "nodes";
      const overNodes = axis === "nodes", places = [...new Set(rows.map((row) => row[axis]))];
      const at = (row) => (overNodes ? Math.log2(row.nodes) : places.indexOf(row[axis]));
      const lineOf = (row) => ["nodes", ...varied].filter((key) => key !== axis).map((key) => `${key} ${row[key]}`).join(", ") || name;
      const lines = [...new Set(rows.map(lineOf))];
      const has = (value) => value !== null && value !== undefined;
      const curve = (value, told = "", style = {}) => lines.map((line, place) => {
        const first = rows.find((row) => lineOf(row) === line);
        const cells = rows.filter((row) => lineOf(row) === line && has(value(row, first)));
        return { name: line + told, ...styleOf(place), ...style, x: cells.map(at), y: cells.map((row) => value(row, first)) };
      });
      const speeds = () => [
        ...curve((row) => row.tokens_per_second),
        ...curve((row) => row.planned_tokens_per_second, ", planned", { dash: "7 4" }).filter(({ x }) => x.length),
        ...(overNodes ? curve((row, first) => (first.tokens_per_second / first.nodes) * row.nodes, ", ideal", { dash: "2 5" }) : []),
      ];
      const shared = { xLabel: () => axis.replaceAll("_", " "), xFormat: () => (place) => (overNodes ? whole(2 ** place) : `${places[place] ?? ""}`), integers: true };
      const share = { yFormat: (value) => percent(value), yTick: (value) => percent(value, 0), ...shared };
      const number = (title, key, format) => ({ name: title, number: true, value: (row) => row[key], show: (row) => format(row[key]) });
      const table = sortableTable([
        { name: "nodes", value: (row) => row.nodes, number: true },
        ...varied.map((key) => ({ name: key, value: (row) => row[key] })),
        number("tokens/s", "tokens_per_second", compact), number("efficiency", "efficiency", (value) => percent(value)),
        number("step", "step_seconds", seconds),
        ...PHASES.map((phase) => number(phase, `${phase}_seconds`, seconds)),
        number("planned tokens/s", "planned_tokens_per_second", compact), number("error of the plan", "plan_error", (value) => percent(value)),
      ].filter((column) => rows.some((row) => has(column.value(row)))), rows, { caption: `Cells of ${name}` });
      const splitOf = (row) => {
        const parts = Object.fromEntries(PHASES.map((phase) => [phase, Math.max(0, row[`${phase}_seconds`] ?? 0)]));
        const told = ["nodes", ...varied].map((key) => `${key} ${row[key]}`).join(", ");
        return el("div", {}, el("p", { class: "small" }, `${told}: ${seconds(row.step_seconds)} a step`),
          stackedBar(parts, Object.values(parts).reduce((sum, part) => sum + part, 0), seconds, PHASES));
      };
      return el("div", {}, el("h3", {}, name), el("div", { class: "grid", style: "margin:.6rem 0 1rem" },
        new Chart({ title: "Tokens a second", yFormat: compact, log: new Shared(true), ...shared, series: speeds }).card,
        new Chart({ title: "Efficiency", about: "tokens a second and node, over those of the first cell", ...share,
          references: () => (overNodes ? [{ y: 1, text: "ideal" }] : []), series: () => curve((row) => row.efficiency) }).card,
        new Chart({ title: "Error of the plan", about: "planned over measured tokens a second, minus 1", ...share,
          references: () => [{ y: 0, text: "" }], series: () => curve((row) => row.plan_error) }).card,
        el("div", { class: "card wide-card" }, el("h3", {}, "Seconds of a step, and for each step between two of them"),
          el("div", { class: "grid fit", style: "margin-top:.6rem" }, rows.map(splitOf)))), table);
    }));
}

function seconds(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 1 ? `${significant(value * 1000, 3)} ms` : `${significant(value, 3)} s`;
}

/** A bar of parts that add up to a whole, with its legend. `order`: all names, which gives each its color. */
function stackedBar(parts, total, format, order) {
  let at = 0;
  const drawn = Object.entries(parts).filter(([, value]) => value > 0);
  const styles = drawn.map(([name]) => order.indexOf(name)).map((place) => ({ fill: `var(--s${place % 7})`, opacity: place < 7 ? 1 : 0.55 }));
  const bar = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", width: "100%", height: 22, role: "img",
    "aria-label": drawn.map(([name, value]) => `${name} ${percent(value / total)}`).join(", ") },
  drawn.map(([, value], place) => {
    const width = (100 * value) / total;
    const rect = svg("rect", { x: at, y: 0, width, height: 6, ...styles[place] });
    at += width;
    return rect;
  }));
  const key = drawn.map(([name, value], place) => el("li", {},
    el("i", { style: `background:${styles[place].fill};opacity:${styles[place].opacity}` }), `${name} ${percent(value / total)} (${format(value)})`));
  return el("div", {}, bar, el("ul", { class: "key" }, key));
}
