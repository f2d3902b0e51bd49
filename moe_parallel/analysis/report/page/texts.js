// What tools/analyze.py found on texts: loads, specialization, pairs of experts, and the tokens.

const textLayer = new Shared(0);
const textMeasure = new Shared("experts_per_token");
const tokenRun = new Shared("0");
const tokenText = new Shared("0");
const tokenMode = new Shared("used");
const tokenLayer = new Shared(-1); // -1: all layers

function layerAt(analysis) {
  return Math.min(textLayer.value, analysis.layers.length - 1);
}

function loadOfTexts(run) {
  const { text } = run;
  const load = decoded(text.load);
  return loadMap(run, {
    rowLabel: "text", follows: [textLayer, shownRuns], about: () => `layer ${text.layers[layerAt(text)]}`,
    data: () => ({
      rows: text.texts.map(({ name }) => name), columns: numbersTo(text.experts),
      value: (row, column) => load.get(row, layerAt(text), column),
    }),
  });
}

function loadOfLayers(run, place) {
  const { text } = run;
  const load = decoded(text.load);
  return loadMap(run, {
    title: el("span", {}, runName(run), ` on ${text.texts[place].name}`), rowLabel: "layer", follows: [shownRuns],
    about: `Ent_load ${fixed(mean(text.ent_load[place]), 3)}, Ent_conf ${fixed(mean(text.ent_conf[place]), 3)} nats, means over layers`,
    data: () => ({
      rows: text.layers.map(String), columns: numbersTo(text.experts), value: (row, column) => load.get(place, row, column),
    }),
  });
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
}

const TEXT_MEASURES = {
  experts_per_token: "Experts per token (Dynamic routing, Fig. 4)", ent_load: "Ent_load, nats (AoE, Fig. 3)",
  ent_conf: "Ent_conf, nats (AoE, Fig. 3)", dropped: "Share of choices dropped",
};

function textsByLayer(runs) {
  let style = 0;
  const styled = runs.flatMap((run) => run.text.texts.map(({ name }, place) => ({ run, name, place, ...styleOf(style++) })));
  return new Chart({
    title: "By layer and text", class: "wide-card", follows: [shownRuns, textMeasure], integers: true,
    xLabel: () => "layer", xFormat: () => whole, yFormat: (value) => significant(value, 4),
    series: () => styled.filter(({ run }) => isShown(run)).map(({ run, name, place, color, dash }) => ({
      name: `${run.name}: ${name}`, color, dash, x: run.text.layers, y: run.text[textMeasure.value][place],
    })),
  }).card;
}

/** Experts per token and other means by text. [Dynamic routing, Tables 2 and 3] */
function textTable(runs) {
  const rows = runs.flatMap((run) => run.text.texts.map(({ name, tokens }, place) => ({ run, name, tokens, place })));
  const number = (name, key, places, title) => ({
    name, number: true, title, value: ({ run, place }) => mean(run.text[key][place]), show: ({ run, place }) => fixed(mean(run.text[key][place]), places),
  });
  return sortableTable([
    { name: "run", value: ({ run }) => run.name, show: ({ run }) => runName(run) },
    { name: "text", value: ({ name }) => name },
    { name: "tokens", number: true, value: ({ tokens }) => tokens, show: ({ tokens }) => compact(tokens) },
    number("experts/token", "experts_per_token", 3, "mean over layers; of merged experts those with a weight above 2/n"),
    number("Ent_load", "ent_load", 3, "nats, mean over layers"), number("Ent_conf", "ent_conf", 3, "nats, mean over layers"),
    { name: "dropped", number: true, value: ({ run, place }) => mean(run.text.dropped[place]) || null, show: ({ run, place }) => percent(mean(run.text.dropped[place]), 2) },
  ].filter(({ name, value }) => name !== "dropped" || rows.some(value)), rows, { caption: "Experts per token and entropies by text (Dynamic routing, Tables 2 and 3)" });
}

function testTable(runs) {
  const rows = runs.flatMap((run) => run.text.tests.map((test) => ({ run, ...test })));
  if (!rows.length) return el("p", { class: "quiet" }, "The test of specialization needs at least two texts.");
  return sortableTable([
    { name: "run", value: ({ run }) => run.name, show: ({ run }) => runName(run) },
    { name: "layer", value: ({ layer }) => layer ?? 0, show: ({ layer }) => (layer === null ? "mean of all" : layer) },
    { name: "I(expert; text)", number: true, value: (row) => row.mutual_information, show: (row) => fixed(row.mutual_information, 5) },
    { name: "by chance", number: true, value: (row) => row.by_chance, show: (row) => fixed(row.by_chance, 5) },
    { name: "above chance", number: true, value: (row) => row.mutual_information - row.by_chance, show: (row) => fixed(row.mutual_information - row.by_chance, 5) },
    { name: "p", number: true, value: ({ p }) => p, show: ({ p }) => significant(p, 2) },
  ], rows, { caption: "Specialization of the experts by text", tall: rows.length > 12, start: { column: 1, descending: false } });
}

function pairsOf(run) {
  const { pairs } = run.text;
  const share = decoded(pairs);
  const place = () => pairs.layers.reduce((best, layer, at) =>
    (Math.abs(layer - run.text.layers[layerAt(run.text)]) < Math.abs(pairs.layers[best] - run.text.layers[layerAt(run.text)]) ? at : best), 0);
  return new HeatMap({
    title: runName(run), palette: "plain", rowLabel: "of the tokens of expert", columnLabel: "also used: expert", valueLabel: "share of tokens",
    format: (value) => percent(value), short: (value) => fixed(100 * value, 0), follows: [textLayer, shownRuns],
    about: () => `layer ${pairs.layers[place()]}; the darkest cell is ${percent(pairs.top)}`,
    data: () => (isShown(run) ? {
      rows: numbersTo(run.text.experts), columns: numbersTo(run.text.experts),
      value: (row, column) => share.get(place(), row, column), share: (number) => number / pairs.top,
    } : null),
  }).card;
}

/** The items with the most and the fewest experts. [Dynamic routing, Table 4] */
function vocabularyOf(run) {
  const { vocabulary } = run.text;
  const list = (rows, caption) => sortableTable([
    { name: "item", value: ({ piece }) => piece, show: ({ piece }) => el("code", {}, visiblePiece(piece)) },
    { name: "experts", number: true, value: ({ experts }) => experts, show: ({ experts }) => fixed(experts, 3) },
    { name: "times", number: true, value: ({ times }) => times, show: ({ times }) => whole(times) },
  ], rows, { caption, tall: true });
  return el("div", { class: "card wide-card" }, el("h3", {}, runName(run)),
    el("p", { class: "about" }, `${whole(vocabulary.items)} items occur at least ${vocabulary.at_least} times.`),
    el("div", { class: "grid fit", style: "margin-top:.6rem" },
      el("div", {}, el("p", { class: "small" }, "Most experts"), list(vocabulary.most, `${run.name}: items with the most experts`)),
      el("div", {}, el("p", { class: "small" }, "Fewest experts"), list(vocabulary.fewest, `${run.name}: items with the fewest experts`))));
}

function visiblePiece(piece) {
  return JSON.stringify(piece).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "\u00b7") || "(empty)";
}

function expertColor(expert) {
  const hue = (expert * 137.508) % 360;
  return isDark() ? `hsl(${hue} 45% ${expert % 2 ? 27 : 34}%)` : `hsl(${hue} 70% ${expert % 2 ? 84 : 76}%)`;
}

/** The text itself, each token in the color of its number of experts or of its best expert. */
function tokenView(runs) {
  const box = el("div", { class: "tokens", tabindex: 0, role: "group" });
  const key = el("ul", { class: "key", "aria-label": "Colors" });
  const reading = el("p", { class: "small quiet", "aria-live": "polite", style: "min-height:1.5em" });
  const choice = el("div", { class: "bar" });
  const state = { spans: [], here: -1, describe: () => "" };

  function chosen() {
    const run = runs[Number(tokenRun.value)] ?? runs[0];
    const views = run.text.view;
    return { run, view: views[Number(tokenText.value)] ?? views[0] };
  }

  function controls() {
    const { run } = chosen();
    const layers = run.text.layers;
    const texts = run.text.view.map(({ text }, place) => [String(place), text]);
    if (Number(tokenText.value) >= texts.length) tokenText.value = "0";
    const focused = choice.contains(document.activeElement);
    const place = new Shared(Math.min(tokenLayer.value + 1, layers.length));
    place.follow((value) => tokenLayer.set(value - 1));
    choice.replaceChildren(
      selectOf("Run", runs.map(({ name }, at) => [String(at), name]), tokenRun), selectOf("Text", texts, tokenText),
      selectOf("Color", [["used", "number of experts"], ["best", "best expert"]], tokenMode),
      sliderOf("Layer", layers.length + 1, place, (value) => (value === 0 ? "all" : String(layers[value - 1]))));
    if (focused) choice.querySelector("select").focus();
  }

  function draw() {
    const { run, view } = chosen();
    const used = decoded(view.used);
    const layers = run.text.layers.map((_, place) => place);
    const layer = Math.min(tokenLayer.value, layers.length - 1);
    const count = (token) => (layer >= 0 ? used.get(token, layer) : mean(layers.map((at) => used.get(token, at))));
    const expertOf = (token, at) => (view.best[token][at] < 0 ? null : view.best[token][at]);
    const shownLayer = Math.max(0, layer);
    const counts = view.pieces.map((_, token) => count(token));
    const [low, high] = [Math.min(...counts), Math.max(...counts)];
    const colorOfCount = (value) => colorOf("plain", high > low ? 0.06 + (0.8 * (value - low)) / (high - low) : 0.06);
    state.describe = (token) => `Token ${token + 1} of ${view.pieces.length}, ${visiblePiece(view.pieces[token])}: ` +
      `${significant(counts[token], 3)} experts (${layer >= 0 ? `layer ${run.text.layers[layer]}` : "mean over layers"}); best expert ` +
      layers.filter((at) => layer < 0 || at === layer).slice(0, 12).map((at) => `${expertOf(token, at) ?? "none"} in layer ${run.text.layers[at]}`).join(", ");
    state.spans = view.pieces.map((piece, token) => {
      const span = el("span", {}, piece || "\u25af");
      if (tokenMode.value === "used") {
        const rgb = colorOfCount(counts[token]);
        span.style.background = `rgb(${rgb})`;
        span.style.color = inkOn(rgb);
      } else {
        const expert = expertOf(token, shownLayer);
        if (expert !== null) span.style.background = expertColor(expert);
      }
      return span;
    });
    const parts = [];
    state.spans.forEach((span, token) => {
      if (token && view.samples[token] !== view.samples[token - 1]) parts.push(el("hr"));
      parts.push(span);
    });
    box.replaceChildren(...parts);
    box.setAttribute("aria-label", `${view.pieces.length} tokens of ${view.text}, read by ${run.name}. Arrow keys go from token to token.`);
    key.replaceChildren(...(tokenMode.value === "used"
      ? [low, (low + high) / 2, high].filter((value, place) => place === 0 || high > low).map((value) => legend(`rgb(${colorOfCount(value)})`, `${significant(value, 3)} experts`))
      : frequent(view.pieces.map((_, token) => expertOf(token, shownLayer)).filter((expert) => expert !== null))
        .map(([expert, times]) => legend(expertColor(expert), `expert ${expert}: ${percent(times / view.pieces.length, 0)}`))));
    if (tokenMode.value === "best" && layer < 0) key.append(el("li", { class: "quiet" }, `colors of layer ${run.text.layers[0]}: choose another with the slider`));
    move(-1);
  }

  function move(token) {
    state.spans[state.here]?.classList.remove("here");
    state.here = token;
    state.spans[token]?.classList.add("here");
    reading.textContent = token < 0 ? "" : state.describe(token);
  }

  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    move(Math.min(state.spans.length - 1, Math.max(0, state.here + (state.here < 0 ? 1 : step))));
    state.spans[state.here].scrollIntoView({ block: "nearest" });
  });
  box.addEventListener("pointerover", (event) => {
    const token = state.spans.indexOf(event.target);
    if (token >= 0) move(token);
  });
  if (!runs.some(({ text }) => text.view.some(({ varies }) => varies))) tokenMode.value = "best";
  const redraw = onDemand(box, draw);
  tokenRun.follow(() => { controls(); redraw(); });
  for (const shared of [tokenText, tokenMode, tokenLayer]) shared.follow(redraw);
  controls();
  return el("div", { class: "wide-card" }, choice, box, key, reading);
}

function legend(color, text) {
  return el("li", {}, el("i", { style: `background:${color}` }), text);
}

/** The twelve most frequent values with their number. */
function frequent(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((one, other) => other[1] - one[1]).slice(0, 12);
}

function textsSection(all) {
  const runs = all.filter((run) => run.text);
  if (!runs.length) return null;
  const layers = Math.max(...runs.map((run) => run.text.layers.length));
  const widest = runs.find((run) => run.text.layers.length === layers).text.layers;
  const heading = (text, about) => el("div", { class: "wide-card" }, el("h3", {}, text), about ? el("p", { class: "small quiet" }, about) : null);
  const varied = runs.filter((run) => run.text.vocabulary.varies && !run.text.merged);
  const readable = runs.filter((run) => run.text.view.length);
  const [first] = runs;
  return section("texts", "On given text", "What the trained models select on texts, collected by tools/analyze.py.",
    textTable(runs), el("div", { class: "grid", style: "margin-top:1.2rem" },
      el("div", { class: "wide-card bar", style: "margin:0" },
        selectOf("Measure", Object.entries(TEXT_MEASURES).filter(([name]) => name !== "dropped" || runs.some((run) => run.text.dropped.flat().some(Boolean))), textMeasure)),
      textsByLayer(runs),
      heading("Specialization", `Mutual information of expert and text in nats: 0 if all texts use the experts alike. By chance: mean over ${whole(first.text.permutations)} ` +
        "permutations of the texts' labels over blocks of sequences; p: share of them with at least as much."),
      el("div", { class: "wide-card" }, testTable(runs)),
      el("div", { class: "wide-card bar", style: "margin:0" }, sliderOf("Layer", layers, textLayer, (place) => `layer ${widest[place]}`), scaleLegend("load", "0", "4 or more", "times an even share")),
      heading("Load by text (Lory, Fig. 6)", "of merged experts: the mean weight, in multiples of 1/n"), runs.map(loadOfTexts),
      heading("Co-activation", "of the tokens that use one expert, the share that also uses another; of merged experts those with a weight above 2/n"), runs.map(pairsOf),
      heading("Load of all layers (AoE, Fig. 3; Lory, Fig. 11)"), runs.flatMap((run) => run.text.texts.map((_, place) => loadOfLayers(run, place))),
      varied.length ? heading("Items of the vocabulary by their number of experts (Dynamic routing, Table 4)") : null, varied.map(vocabularyOf),
      readable.length ? heading("The text, token by token") : null, readable.length ? tokenView(readable) : null,
      el("div", { class: "wide-card" }, runs.map((run) => el("div", {}, el("p", { class: "small quiet" }, `${run.name}: ${run.text.checkpoint ?? run.text.folder}`), run.text.command ? commandOf(run.text.command) : null)))));
}
