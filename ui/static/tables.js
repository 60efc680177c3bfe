// Tables that sort and filter: those in a `.ts-table[data-sort]`, also when the server has sent them again.
const Tables = (() => {
  const FILTERED_ROWS = 16;
  const views = new Map();  // by the table's label: {column, direction: "ascending" or "descending", words}
  let focused = null;       // {label, column (null: the filter), control, caret}

  // What a cell is ordered by: a value that its markup states, else the number that its text begins with, else the text.
  function valueOf(cell) {
    const marked = cell.querySelector("data, time, [role=meter]"), text = cell.textContent.trim();
    if (marked?.matches("data")) return +marked.value;
    if (marked?.matches("time")) return Date.parse(marked.dateTime);
    if (marked) return +marked.getAttribute("aria-valuenow");
    if (text === "" || text === "-") return null;
    const number = /^[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?(?![-:.\w])/i.exec(text);
    return number ? +number[0].replaceAll(",", "") : text;
  }

  // Numbers before texts; an empty cell is last whichever way.
  function ordered(rows, { column, direction }) {
    const sign = direction === "descending" ? -1 : 1;
    const keyed = rows.map((row) => ({ row, value: valueOf(row.cells[column]) }));
    return keyed.sort(({ value: a }, { value: b }) => {
      if (a === null || b === null) return (a === null) - (b === null);
      if (typeof a !== typeof b) return sign * (typeof a === "number" ? -1 : 1);
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    }).map(({ row }) => row);
  }

  function show(table, rows, label) {
    const view = views.get(label), [body] = table.tBodies, words = view.words.toLowerCase();
    body.append(...(view.direction ? ordered(rows, view) : rows));
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(words);
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      if (view.direction && column === view.column) cell.setAttribute("aria-sort", view.direction);
      else cell.removeAttribute("aria-sort");
    });
  }

  // A header's text becomes a button; beside a header with a link stands one of its own.
  function addButton(head, press) {
    const name = head.textContent.trim();
    if (!name) return null;
    const button = Live.make("button", { type: "button", class: "ts-sort", onclick: press });
    if (head.querySelector("a")) button.setAttribute("aria-label", `Sort by ${name}`);
    else button.append(...head.childNodes);
    head.append(button);
    return button;
  }

  function addFilter(region, rows, label, changed) {
    const view = views.get(label);
    const count = Live.make("span", { class: "ts-note", role: "status" });
    const tell = () => { count.textContent = view.words ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : ""; };
    const words = Live.make("input", { type: "search", value: view.words, oninput: () => {
      view.words = words.value;
      changed();
      tell();
    } });
    if (region.previousElementSibling?.matches(".ts-filter")) region.previousElementSibling.remove();
    region.before(Live.make("div", { class: "ts-tools ts-filter" }, Live.make("label", {}, "Filter ", words), count));
    return { words, tell };
  }

  function equip(table) {
    table.dataset.ready = "";
    const region = table.parentElement, label = region.getAttribute("aria-label");
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 2) return;
    if (!views.has(label)) views.set(label, { column: null, direction: null, words: "" });
    const view = views.get(label), controls = new Map();
    const redraw = () => show(table, rows, label);
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = addButton(head, () => {  // upwards, downwards, as it came
        const before = view.column === column ? view.direction : null;
        view.column = column;
        view.direction = { ascending: "descending", descending: null }[before] ?? (before ? null : "ascending");
        redraw();
      });
      if (button) controls.set(column, button);
    });
    const filter = rows.length >= FILTERED_ROWS || view.words ? addFilter(region, rows, label, redraw) : null;
    if (filter) controls.set(null, filter.words);
    redraw();
    filter?.tell();
    for (const [column, control] of controls)
      for (const event of ["focus", "input", "keyup"])
        control.addEventListener(event, () => { focused = { label, column, control, caret: control.selectionStart }; });
    if (focused?.label !== label || focused.control.isConnected || document.activeElement !== document.body) return;
    const { column, caret } = focused, again = controls.get(column);  // the focus event will write another caret
    again?.focus();
    if (column === null) again?.setSelectionRange(caret, caret);
  }

  const look = () => document.querySelectorAll(".ts-table[data-sort] > table:not([data-ready])").forEach(equip);
  addEventListener("DOMContentLoaded", () => {
    new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
    look();
  });
})();
