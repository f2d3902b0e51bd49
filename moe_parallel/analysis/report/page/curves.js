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

/** [curve, title, about, format, options] of the charts that all runs share. */
function chartsOf(runs) {
  const three = (value) => fixed(value, 3);
  const domains = (stem) => [...new Set(runs.flatMap((run) => Object.keys(run.curves)))]
    .filter((name) => name.startsWith(`${stem}/`)).map((name) => [name, name.slice(stem.length + 1)]);
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
    ["load_balancing_loss", "Load balancing loss", "without its coefficient, mean over layers", significant],
    ["importance_loss", "Importance loss", "without its coefficient, mean over layers", significant],
    ["z_loss", "Router z-loss", "without its coefficient, mean over layers", significant],
    ["entropy_loss", "Entropy loss", "without its coefficient, mean over layers", significant],
    ["erc_loss", "Coupling loss (ERC)", "without its coefficient, mean over layers", significant],
    ["erc_norm", "Norm in the coupling loss", "of a row of the router times its own expert's W_g, mean over experts and layers", significant],
    ["l1_loss", "L1 loss", "without its coefficient, mean over layers", significant],
    ["routing_free_loss", "Loss of Routing-Free MoE", "without its coefficient, mean over layers", significant],
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
