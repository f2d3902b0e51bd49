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
