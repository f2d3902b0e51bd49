// The runs: which are shown, what to know first, their numbers, and how they were started.

const shownRuns = new Shared(null); // Set of places, set in start.js

function visible(runs) {
  return runs.filter((_, place) => shownRuns.value.has(place));
}

/** The check boxes that show or hide a run in every figure. */
function runChips(runs) {
  const boxes = runs.map((run, place) => {
    const box = el("input", { type: "checkbox", checked: true, onchange: () => {
      const shown = new Set(shownRuns.value);
      if (box.checked) shown.add(place);
      else shown.delete(place);
      shownRuns.set(shown);
    } });
    return box;
  });
  const all = (checked) => () => {
    for (const box of boxes) box.checked = checked;
    shownRuns.set(new Set(checked ? runs.keys() : []));
  };
  return el("div", { class: "bar", role: "group", "aria-label": "Runs in the figures" },
    el("ul", { class: "chips" }, runs.map((run, place) =>
      el("li", {}, el("label", {}, boxes[place], swatch(run.style), run.name)))),
    runs.length > 3 ? el("span", {}, el("button", { type: "button", onclick: all(true) }, "All"), " ",
      el("button", { type: "button", onclick: all(false) }, "None")) : null);
}

const LEVELS = { problem: "Problem", warning: "Warning", note: "Note" };

function findingsSection(runs) {
  const rows = runs.flatMap((run) => run.findings.map((finding) => ({ run, ...finding })));
  const order = Object.keys(LEVELS);
  rows.sort((one, other) => order.indexOf(one.level) - order.indexOf(other.level));
  const counts = order.map((level) => [level, rows.filter((row) => row.level === level).length]).filter(([, count]) => count);
  const places = [...new Set(runs.flatMap((run) => run.loads))].map((place) => {
    const many = runs.filter((run) => run.loads.includes(place)).length;
    return many === runs.length ? place : `${place} (${many} of ${runs.length} runs)`;
  });
  const found = counts.map(([level, count]) => `${count} ${LEVELS[level].toLowerCase()}${count === 1 ? "" : "s"}`).join(", ");
  const intro = `${found || "None"}. Looked at: losses, gradient norms, ranks, ` +
    (places.length ? `and the load of each expert of each layer ${places.join(" and ")}.` : "but no loads of experts: no run has any.");
  const item = ({ run, level, kind, text }) => el("li", { class: level },
    el("span", { class: `tag ${level}` }, `${LEVELS[level]}: ${kind}`), el("strong", {}, run.name), el("span", {}, text));
  const shown = 12;
  return section("warnings", "Warnings", intro,
    el("ul", { class: "findings" }, rows.slice(0, shown).map(item)),
    rows.length > shown ? unfolding(`${rows.length - shown} more`, () => el("ul", { class: "findings" }, rows.slice(shown).map(item))) : null);
}

function runName(run) {
  return el("span", { class: run.name.length <= 22 ? "run-name short" : "run-name" }, swatch(run.style), run.name);
}

function runsSection(runs) {
  const domains = [...new Set(runs.flatMap((run) => Object.keys(run.facts)))]
    .filter((name) => name.includes("/")).map((name) => name.split("/")).filter(([, measure]) => ["loss", "bits_per_byte"].includes(measure));
  const fact = (name, key, format, more = {}) => ({
    name, number: true, value: (run) => run.facts[key] ?? null, show: (run) => format(run.facts[key] ?? null), ...more,
  });
  const three = (value) => fixed(value, 3);
  const columns = [
    { name: "run", value: (run) => run.name, show: runName },
    { name: "system", value: (run) => run.facts.system, show: (run) => run.facts.system ?? NONE },
    { name: "experts", number: true, title: "MoE layers × experts of a layer",
      value: (run) => (run.facts.layers ?? 0) * (run.facts.experts ?? 0),
      show: (run) => (run.facts.experts ? `${run.facts.layers} × ${run.facts.experts}` : NONE) },
    fact("iterations", "iterations", whole),
    fact("tokens", "tokens", compact),
    fact("training loss", "train_loss", three, { title: "nats per token, last tenth" }),
    ...domains.map(([domain, measure]) => measure === "loss"
      ? fact(`${domain} loss`, `${domain}/loss`, three, { title: `nats per token of held-out ${domain}` })
      : fact(`${domain} bits/byte`, `${domain}/bits_per_byte`, three, { title: `held-out ${domain}` })),
    fact("experts/token", "experts_per_token", (value) => fixed(value, 2), { title: "of the last evaluation, mean over layers" }),
    fact("Ent_load", "ent_load", three, { title: "nats, mean over layers, last tenth: higher is more even" }),
    fact("Ent_conf", "ent_conf", three, { title: "nats, mean over layers, last tenth: lower is more confident" }),
    fact("I(expert; domain)", "mutual_information", (value) => fixed(value, 4), { title: "mutual information on held-out text, nats" }),
    fact("dropped", "dropped_share", (value) => percent(value, 2), { title: "share of all choices in training" }),
    fact("tokens/s", "tokens_per_second", compact, { title: "median" }),
    fact("peak memory", "peak_memory_bytes", bytes, { title: "of the rank that used most" }),
    { name: "warnings", number: true, value: (run) => run.findings.filter(({ level }) => level !== "note").length },
  ];
  const used = columns.filter((column, place) => place < 2 || runs.some((run) => ![null, undefined].includes(column.value(run))));
  return section("runs", "Runs", "Select a heading to sort. A single run does not tell a small difference from chance: train several seeds.",
    sortableTable(used, runs, { caption: "Runs and their numbers" }));
}

function copyButton(text) {
  const button = el("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } }, "Copy");
  return button;
}

/** A command, whose lines break between words and not at the hyphens of flags. */
function commandOf(text) {
  const words = text.split(" ").flatMap((word, place) => [place ? " " : "", el("span", { class: "word" }, word)]);
  return el("div", { class: "command" }, el("pre", { tabindex: 0 }, words), copyButton(text));
}

function factsOf(pairs) {
  return el("p", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => el("span", {}, `${name} `, el("b", {}, String(value)))));
}

function startOf(start) {
  const versions = Object.entries(start.versions ?? {});
  return el("div", {},
    start.command ? commandOf(start.command) : el("p", { class: "quiet" }, "started by another program"),
    factsOf([["started", start.time], ["in", start.directory], ["ranks", start.ranks], ["continued from", start.load], ["on", start.platform], ...versions]));
}

function commandsSection(runs) {
  const cards = runs.map((run) => el("div", { class: "card" }, el("h3", {}, runName(run)), el("p", { class: "about mono" }, run.path),
    run.starts.slice(-1).map(startOf),
    run.starts.length > 1 ? unfolding(`${run.starts.length - 1} earlier starts`, () => el("div", {}, run.starts.slice(0, -1).map(startOf))) : null,
    run.starts.length ? null : el("p", { class: "about" }, "The run recorded no command."),
    unfolding("All options", () => sortableTable([
      { name: "option", value: ([flag]) => `--${flag}` }, { name: "value", value: ([, value]) => value },
    ], Object.entries(run.options), { caption: `Options of ${run.name}`, tall: true }))));
  return section("commands", "Commands and options", null, differences(runs), el("div", { class: "grid broad" }, cards));
}

/** The options with several values, and those that only some of the systems have. */
function differences(runs) {
  if (runs.length < 2) return null;
  const flags = [...new Set(runs.flatMap((run) => Object.keys(run.options)))].filter((flag) => flag !== "save");
  const values = (flag) => runs.map((run) => run.options[flag]).filter((value) => value !== undefined);
  const several = flags.filter((flag) => new Set(values(flag)).size > 1);
  const some = flags.filter((flag) => !several.includes(flag) && values(flag).length < runs.length);
  const table = (rows, caption) => sortableTable([
    { name: "option", value: (flag) => `--${flag}` },
    ...runs.map((run) => ({ name: run.name, value: (flag) => run.options[flag] ?? NONE })),
  ], rows, { caption, tall: rows.length > 12 });
  return el("div", { style: "margin-bottom:1rem" },
    several.length ? [el("h3", { style: "margin-bottom:.4rem" }, "Options that differ"), table(several, "Options that differ between the runs")]
      : el("p", { class: "quiet" }, "No option differs between the runs."),
    some.length ? unfolding(`${some.length} options that only some runs have`, () => table(some, "Options that only some runs have")) : null);
}

// Losses, speed and routing over the run, all runs in each chart.

const axis = new Shared("iterations");
const curveView = new Shared(null);
const smoothing = new Shared(0);
const logScale = new Shared(false);

const AXES = {
  iterations: { label: "iteration", format: compactTick },
  tokens: { label: "tokens read", format: compactTick },
  hours: { label: "hours of training", format: (value) => significant(value, 3) },
};

function compactTick(value) {
  return Math.abs(value) < 10_000 ? value.toLocaleString("en-US", { maximumFractionDigits: 2 }) : compact(value);
}

/** Iterations on the chosen axis. */
function onAxis(run, iterations) {
  const { clock } = run;
  const values = clock[axis.value];
  if (axis.value === "iterations" || !clock.iterations.length) return iterations;
  let place = 0;
  return iterations.map((iteration) => {
    while (place < clock.iterations.length - 2 && clock.iterations[place + 1] < iteration) place += 1;
    const [low, high] = [place, Math.min(place + 1, clock.iterations.length - 1)];
    const span = clock.iterations[high] - clock.iterations[low];
    const part = span ? (iteration - clock.iterations[low]) / span : 0;
    return Math.max(0, values[low] + part * (values[high] - values[low]));
  });
}

function xOptions() {
  return { xLabel: () => AXES[axis.value].label, xFormat: () => AXES[axis.value].format };
}

function runSeries(runs, name) {
  return visible(runs).filter((run) => run.curves[name]).map((run) => ({
    name: run.name, ...run.style, x: onAxis(run, run.curves[name].x), y: run.curves[name].y,
  }));
}

/** The titles of known auxiliary losses; another loss is called by its name. */
const LOSSES = {
  load_balancing_loss: "Load balancing loss", importance_loss: "Importance loss", z_loss: "Router z-loss", entropy_loss: "Entropy loss",
  erc_loss: "Coupling loss (ERC)", l1_loss: "L1 loss", routing_free_loss: "Loss of Routing-Free MoE",
};

/** [curve, title, about, format, options] of the charts that all runs share. */
function chartsOf(runs) {
  const three = (value) => fixed(value, 3);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const domains = (stem) => names.filter((name) => name.startsWith(`${stem}/`)).map((name) => [name, name.slice(stem.length + 1)]);
  const ceilings = () => {
    const counts = [...new Set(visible(runs).map((run) => run.facts.experts).filter(Boolean))];
    return counts.length > 3 ? [] : counts.map((count) => ({ y: Math.log(count), text: `ln ${count}` }));
  };
  return [
    ["train", "Training loss", "nats per token", three, { log: logScale }],
    ...domains("loss").map(([name, domain]) => [name, `Held-out loss: ${domain}`, "nats per token", three, { log: logScale }]),
    ...domains("bits").map(([name, domain]) => [name, `Held-out text: ${domain}`, "bits per byte", three, { log: logScale }]),
    ["grad_norm", "Gradient norm", null, significant, { log: logScale }],
    ["learning_rate", "Learning rate", null, (value) => significant(value, 3)],
    ["tokens_per_second", "Speed", "tokens a second, all ranks", compact],
    ["mfu", "Model FLOPs utilization", "share of the peak", (value) => percent(value), { yTick: (value) => percent(value, 1) }],
    ["tflops_per_device", "TFLOP/s of a device", null, (value) => significant(value, 3)],
    ["joules_per_token", "Energy", "joules a token", (value) => significant(value, 3)],
    ["peak_memory_bytes", "Peak memory", "of the rank that used most", bytes],
    ["ent_load", "Ent_load", "Evenness of the load, nats, mean over layers: higher is more even", three, { references: ceilings }],
    ["ent_conf", "Ent_conf", "Entropy of a token's probabilities, nats, mean over layers: lower is more confident", three, { references: ceilings }],
    ["imbalance", "Busiest expert", "its load in multiples of an even share, over all layers", (value) => significant(value, 3)],
    ["rank_overload", "Busiest rank", "choices of its experts over those of the mean rank", three],
    ["experts_per_token", "Experts per token", "mean over layers (Dynamic routing, Fig. 3)", (value) => fixed(value, 2)],
    ["experts_used", "Experts in use", "merged experts with a weight above 2/n since the record before (Lory, Fig. 9)", whole],
    ["dropped", "Dropped choices", "share of the choices over capacity", (value) => percent(value, 2)],
    ...names.filter((name) => name.endsWith("_loss") && !name.includes("/"))
      .map((name) => [name, LOSSES[name] ?? name.replaceAll("_", " "), "without its coefficient, mean over layers", significant]),
    ["erc_norm", "Norm in the coupling loss", "of a row of the router times its own expert's W_g, mean over experts and layers", significant],
    ["l1_coefficient", "Coefficient of the L1 loss", "set after each step for the mean number of experts", significant],
    ["balance_coefficient", "Coefficient of Routing-Free MoE", "of its loss, set after each step for the mean number of experts", significant],
    ["top_p", "p of top-p", "set after each step for the mean number of experts", three],
  ].filter(([name]) => runs.some((run) => run.curves[name]));
}

function curvesSection(runs) {
  const follows = [shownRuns, axis];
  axis.follow(() => curveView.set(null));
  const charts = chartsOf(runs).map(([name, title, about, yFormat, options = {}]) => new Chart({
    title, about, yFormat, view: curveView, smoothing, follows, ...xOptions(), ...options, series: () => runSeries(runs, name),
  }).card);
  const percentShown = el("output", {}, "off");
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: () => {
    percentShown.textContent = Number(slider.value) ? slider.value : "off";
    smoothing.set(Number(slider.value));
  } });
  const bar = el("div", { class: "bar" },
    selectOf("Axis", Object.entries(AXES).map(([name, { label }]) => [name, label]), axis),
    labeled("Smoothing", slider, percentShown),
    labeled("Log scale of losses", el("input", { type: "checkbox", onchange: (event) => logScale.set(event.target.checked) })),
    el("button", { type: "button", onclick: () => curveView.set(null) }, "Show all"));
  return section("curves", "Curves", "Drag over a chart to zoom all of them, double-click to zoom out. With the keyboard: arrows read values, " +
    "plus and minus zoom, Shift with an arrow moves, 0 shows everything. A cross at the bottom marks a value that is not finite.",
  bar, el("div", { class: "grid" }, charts));
}
