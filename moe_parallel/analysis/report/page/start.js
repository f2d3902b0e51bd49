// Builds the page.

function fail(message) {
  const box = document.getElementById("failure");
  box.hidden = false;
  box.textContent = `This page has a fault: ${message}`;
}
window.addEventListener("error", (event) => fail(event.message));

function themeButton() {
  const button = document.getElementById("theme");
  const show = theme.follow(() => { button.textContent = isDark() ? "Light theme" : "Dark theme"; });
  button.addEventListener("click", () => theme.set(isDark() ? "light" : "dark"));
  show();
}

function navigation(sections) {
  const links = new Map(sections.map((one) => [one, el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)]));
  document.getElementById("sections").append(el("ul", {}, [...links.values()].map((link) => el("li", {}, link))));
  const near = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) near.add(target);
      else near.delete(target);
    }
    const current = sections.find((one) => near.has(one));
    for (const [one, link] of links) {
      if (one === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-80px 0px -60% 0px" });
  for (const one of sections) observer.observe(one);
}

function begin() {
  const report = JSON.parse(document.getElementById("data").textContent);
  const { runs, scaling, made, command } = report;
  runs.forEach((run, place) => Object.assign(run, { place, style: styleOf(place) }));
  shownRuns.set(new Set(runs.keys()));
  const parts = [
    runs.length ? findingsSection(runs) : null,
    runs.length ? runsSection(runs) : null,
    runs.length ? curvesSection(runs) : null,
    expertsSection(runs),
    textsSection(runs),
    scalingSection(scaling),
    runs.length ? commandsSection(runs) : null,
  ].filter(Boolean);
  const main = document.getElementById("main");
  main.append(...parts);
  if (runs.length > 1) document.getElementById("curves").querySelector(".bar").before(runChips(runs));
  const counted = (count, one, more) => (count ? `${count} ${count === 1 ? one : more}` : null);
  document.getElementById("summary").textContent = [
    counted(runs.length, "run", "runs"), counted(scaling.length, "scaling study", "scaling studies"),
    `made ${made.time}`,
  ].filter(Boolean).join(" \u00b7 ");
  document.getElementById("footer").append(
    el("p", {}, `Written by moe_parallel ${made.version}, ${made.time}:`), el("p", { class: "mono" }, command));
  navigation(parts);
  themeButton();
  window.addEventListener("beforeprint", drawAll);
}

try {
  begin();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
} catch (error) {
  fail(error.message);
  throw error;
}
