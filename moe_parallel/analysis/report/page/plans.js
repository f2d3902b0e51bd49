// Scaling studies and the planner.

const PHASES = ["own", "compute", "data", "dispatch", "pipeline", "reduce", "rest"];

function scalingSection(studies) {
  if (!studies.length) return null;
  return section("scaling", "Scaling", "Means over the logged steps after the warm-up. The dashed line is ideal: the speed of the smallest cell times the nodes.",
    studies.map(({ name, rows }) => {
      const known = new Set(["nodes", "ranks", "global_batch_size", "tokens_per_second", "efficiency", "step_seconds", "between_seconds",
        "planned_tokens_per_second", "plan_error", ...PHASES.map((phase) => `${phase}_seconds`)]);
      const varied = Object.keys(rows[0]).filter((key) => !known.has(key));
      // The axis is what the study varies: the nodes or, with one number of nodes, a flag.
      const different = (key) => [...new Set(rows.map((row) => row[key]))];
      const axis = ["nodes", ...varied].find((key) => different(key).length > 1) ?? "nodes";
      const overNodes = axis === "nodes", places = different(axis);
      const at = (row) => (overNodes ? Math.log2(row.nodes) : places.indexOf(row[axis]));
      const lineOf = (row) => varied.filter((key) => key !== axis).map((key) => `${key} ${row[key]}`).join(", ") || name;
      const lines = [...new Set(rows.map(lineOf))];
      const curve = (key, style) => lines.map((line, place) => {
        const cells = rows.filter((row) => lineOf(row) === line && ![null, undefined].includes(row[key]));
        return { name: line, ...styleOf(place), ...style, x: cells.map(at), y: cells.map((row) => row[key]) };
      });
      const ideal = () => (overNodes ? lines : []).map((line, place) => {
        const cells = rows.filter((row) => lineOf(row) === line);
        return { name: `${line}, ideal`, color: styleOf(place).color, dash: "2 5", x: cells.map(at),
          y: cells.map((row) => (cells[0].tokens_per_second / cells[0].nodes) * row.nodes) };
      });
      const planned = () => curve("planned_tokens_per_second", { dash: "7 4" }).filter((one) => one.x.length).map((one) => ({ ...one, name: `${one.name}, planned` }));
      const shared = { xLabel: () => axis.replaceAll("_", " "), xFormat: () => (place) => (overNodes ? whole(2 ** place) : `${places[place] ?? ""}`), integers: true };
      const number = (title, key, format, more = {}) => ({ name: title, number: true, value: (row) => row[key], show: (row) => format(row[key]), ...more });
      const table = sortableTable([
        { name: "nodes", value: (row) => row.nodes, number: true },
        ...varied.map((key) => ({ name: key, value: (row) => row[key] })),
        number("tokens/s", "tokens_per_second", compact), number("efficiency", "efficiency", (value) => percent(value)),
        number("step", "step_seconds", seconds),
        ...PHASES.map((phase) => number(phase, `${phase}_seconds`, seconds)),
        number("planned tokens/s", "planned_tokens_per_second", compact), number("error of the plan", "plan_error", (value) => percent(value)),
      ].filter((column) => rows.some((row) => ![null, undefined].includes(column.value(row)))), rows, { caption: `Cells of ${name}` });
      return el("div", {}, el("h3", {}, name), el("div", { class: "grid", style: "margin:.6rem 0 1rem" },
        new Chart({ title: "Tokens a second", yFormat: compact, log: new Shared(true), ...shared, series: () => [...curve("tokens_per_second", {}), ...planned(), ...ideal()] }).card,
        new Chart({ title: "Efficiency", about: "tokens a second and node, over those of the first cell", yFormat: (value) => percent(value), yTick: (value) => percent(value, 0), ...shared,
          references: () => (overNodes ? [{ y: 1, text: "ideal" }] : []), series: () => curve("efficiency", {}) }).card), table);
    }));
}

function seconds(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 1 ? `${significant(value * 1000, 3)} ms` : `${significant(value, 3)} s`;
}

/** A bar of parts that add up to a whole, with its legend. */
function stackedBar(parts, total, format) {
  let at = 0;
  const drawn = Object.entries(parts).filter(([, value]) => value > 0).sort((one, other) => other[1] - one[1]);
  const bar = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", width: "100%", height: 22, role: "img",
    "aria-label": drawn.map(([name, value]) => `${name} ${percent(value / total)}`).join(", ") },
  drawn.map(([, value], place) => {
    const width = (100 * value) / total;
    const rect = svg("rect", { x: at, y: 0, width, height: 6, fill: `var(--s${place % 7})`, opacity: place < 7 ? 1 : 0.55 });
    at += width;
    return rect;
  }));
  const key = drawn.map(([name, value], place) => el("li", {},
    el("i", { style: `background:var(--s${place % 7});opacity:${place < 7 ? 1 : 0.55}` }), `${name.replaceAll("_", " ")} ${percent(value / total)} (${format(value)})`));
  return el("div", {}, bar, el("ul", { class: "key" }, key));
}

function plansSection(plans) {
  if (!plans.length) return null;
  const gib = (value) => `${fixed(value / 2 ** 30, 1)} GiB`;
  return section("plans", "Plans", "What tools/plan.py predicts by arithmetic. Nothing here was measured.", plans.map(({ name, plan }) => {
    const rows = plan.plans.map((each, place) => ({ place: place + 1, ...each }));
    const size = (key, title = key) => ({ name: title, number: true, value: (row) => row.layout[key] });
    const [best] = rows;
    const table = sortableTable([
      { name: "place", number: true, value: (row) => row.place },
      size("tp"), size("pp"), size("virtual", "vpp"), size("ep"), size("etp"), size("dp"), size("micro_batch", "micro-batch"),
      { name: "recompute", value: (row) => (row.layout.recompute ? "full" : "none") },
      { name: "tokens/s/GPU", number: true, value: (row) => row.tokens_per_second_and_gpu, show: (row) => whole(row.tokens_per_second_and_gpu) },
      { name: "TFLOP/s", number: true, value: (row) => row.model_tflops_per_gpu, show: (row) => whole(row.model_tflops_per_gpu) },
      { name: "step", number: true, value: (row) => row.seconds, show: (row) => seconds(row.seconds) },
      { name: "memory", number: true, value: (row) => row.memory.total, show: (row) => gib(row.memory.total) },
    ], rows, { caption: `Layouts of ${name}` });
    const { total, stage, ...parts } = best.memory;
    const known = Object.fromEntries(Object.entries(parts).filter(([, value]) => typeof value === "number"));
    return el("div", {}, el("h3", {}, `${name}: ${plan.gpus} GPUs`),
      el("div", { class: "grid", style: "margin:.6rem 0 1rem" },
        el("div", { class: "card" }, el("h3", {}, "Time of a step, first layout"), stackedBar(best.seconds_by_part, best.seconds, seconds)),
        el("div", { class: "card" }, el("h3", {}, `Memory of a GPU, stage ${stage}, first layout`), stackedBar(known, total, gib))), table,
      plan.refused ? el("p", { class: "small quiet" }, `${whole(plan.refused)} other layouts do not fit.`) : null);
  }));
}
