// The load of every expert, the entropies of every layer, and the norms of AoE.

const moment = new Shared(1000); // thousandths of the run; 1000 is the end
const layerPlace = new Shared(0);
const layerMeasure = new Shared("ent_load");

const MEASURES = {
  ent_load: ["Ent_load", "evenness of the load, nats"],
  ent_conf: ["Ent_conf", "entropy of a token's probabilities, nats"],
  experts_per_token: ["Experts per token", "mean over tokens (Dynamic routing, Fig. 4)"],
  utilisation: ["Share of experts in use", "merged experts with a weight above 2/n"],
  dropped: ["Dropped choices", "share over the whole run"],
};

function numbersTo(count) {
  return Array.from({ length: count }, (_, place) => String(place));
}

/** The place in a run's `count` moments that the slider stands for. */
function momentOf(count) {
  return Math.min(count - 1, Math.round((moment.value / 1000) * (count - 1)));
}

function isShown(run) {
  return shownRuns.value.has(run.place);
}

/** A map of loads in multiples of an even share. `spec`: what differs from map to map. */
function loadMap(run, spec) {
  return new HeatMap({
    title: runName(run), palette: "load", columnLabel: "expert", valueLabel: "times an even share",
    format: (value) => `${fixed(value, 2)} × an even share`, short: (value) => fixed(value, 2), ...spec,
    data: () => (isShown(run) ? { share: (number) => number / 4, ...spec.data() } : null),
  }).card;
}

function loadByLayer(run) {
  const { routing } = run;
  const load = decoded(routing.load);
  const at = () => momentOf(routing.iterations.length);
  return loadMap(run, {
    rowLabel: "layer", follows: [moment, shownRuns],
    about: () => (moment.value === 1000 ? `iterations ${whole(routing.end_from)} to ${whole(routing.iterations.at(-1))}`
      : `to iteration ${whole(routing.iterations[at()])}`),
    data: () => ({
      rows: routing.layers.map(String), columns: numbersTo(routing.experts),
      value: moment.value === 1000 ? (row, column) => routing.end[row][column] : (row, column) => load.get(at(), row, column),
    }),
  });
}

function loadOverTime(run) {
  const { routing } = run;
  const load = decoded(routing.load);
  const layer = () => Math.min(layerPlace.value, routing.layers.length - 1);
  return loadMap(run, {
    rowLabel: "expert", columnLabel: "iteration", follows: [layerPlace, shownRuns],
    format: (value) => (value >= load.top ? `${load.top} × an even share or more` : `${fixed(value, 2)} × an even share`),
    short: (value) => fixed(value, 1), about: () => `layer ${routing.layers[layer()]}`,
    data: () => ({
      rows: numbersTo(routing.experts), columns: routing.iterations.map(compactTick),
      value: (row, column) => load.get(column, layer(), row),
    }),
  });
}

/** A measure of each layer at the chosen moment, a curve for each run. */
function byLayer(runs) {
  const read = ({ routing }) => {
    if (layerMeasure.value === "dropped") return routing.dropped;
    const values = routing.by_layer[layerMeasure.value];
    return values ? values[momentOf(values.length)] : null;
  };
  const chart = new Chart({
    title: "By layer", about: "at the moment chosen above", class: "wide-card", follows: [shownRuns, moment, layerMeasure],
    xLabel: () => "layer", xFormat: () => whole, integers: true,
    yFormat: (value) => significant(value, 4),
    series: () => visible(runs).filter((run) => run.routing && read(run)).map((run) => ({
      name: run.name, ...run.style, x: run.routing.layers, y: read(run),
    })),
  });
  return chart.card;
}

/** The norms of all experts of a run over training, in the colors of their layers. [AoE, Fig. 4] */
function normsOf(run) {
  const { routing } = run;
  const norms = decoded(routing.norms);
  const [moments, layers, experts] = routing.norms.shape;
  const colorOfLayer = (layer) => `hsl(${250 - (layers > 1 ? (210 * layer) / (layers - 1) : 0)} 65% ${isDark() ? 66 : 42}%)`;
  return new Chart({
    title: runName(run), about: `first layer violet, last layer ${layers > 1 ? "orange" : "too"}; ${layers * experts} experts`, thin: true,
    follows: [shownRuns], xLabel: () => "tokens read", xFormat: () => compactTick, yFormat: (value) => significant(value, 3),
    series: () => {
      if (!isShown(run)) return [];
      const places = Array.from({ length: moments }, (_, place) => place);
      return numbersTo(layers).flatMap((_, layer) => numbersTo(experts).map((__, expert) => ({
        name: `layer ${routing.layers[layer]}, expert ${expert}`, color: colorOfLayer(layer), dash: "",
        x: routing.norms.tokens, y: places.map((place) => norms.get(place, layer, expert)),
      })));
    },
  }).card;
}

function expertsSection(all) {
  const runs = all.filter((run) => run.routing);
  if (!runs.length) return null;
  const layers = Math.max(...runs.map((run) => run.routing.layers.length));
  const widest = runs.find((run) => run.routing.layers.length === layers).routing.layers;
  const measures = Object.entries(MEASURES).filter(([name]) => name === "dropped" || runs.some((run) => run.routing.by_layer[name]));
  const normed = runs.filter((run) => run.routing.norms);
  const heading = (text, about) => el("div", { class: "wide-card" }, el("h3", {}, text), el("p", { class: "small quiet" }, about));
  return section("experts", "Experts", "The load of an expert in multiples of an even share: 1 is perfect balance, 0 is a dead expert.",
    el("div", { class: "bar" },
      sliderOf("Moment of the run", 1001, moment, (value) => (value === 1000 ? "end" : `${fixed(value / 10, 0)}%`)),
      scaleLegend("load", "0", "4 or more", "times an even share")),
    el("div", { class: "grid" }, heading("Load of each expert of each layer (AoE, Fig. 3)", ""), runs.map(loadByLayer),
      el("div", { class: "wide-card bar", style: "margin:0" }, selectOf("Measure by layer", measures.map(([name, [text, about]]) => [name, `${text}: ${about}`]), layerMeasure)),
      byLayer(runs),
      el("div", { class: "wide-card bar", style: "margin:0" },
        sliderOf("Layer", layers, layerPlace, (place) => `layer ${widest[place]}`)),
      heading("Load over the run in one layer", "each column is a part of the run that ends at its iteration"), runs.map(loadOverTime),
      normed.length ? heading("Norms of the experts over training (AoE, Fig. 4)", "mean over tokens; experts that judge alike stay close together") : null,
      normed.map(normsOf)));
}
