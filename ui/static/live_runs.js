// The table of runs. The view is kept in the URL, so that reloads and shared links show the same view.
Live.runs = (element, server) => {
  const { make, poll, durationText, timeText, numberText, badge, runPage } = Live;
  const root = element.querySelector(".ts-runs");
  const params = new URLSearchParams(location.search);
  const view = {
    state: params.get("state") || "", words: params.get("q") || "", sort: params.get("sort") || "started_at",
    down: params.get("down") !== "0", page: +params.get("page") || 0,
  };
  const selected = new Set();
  let digest = "", live = [];

  const COLUMNS = [
    ["id", "Run"], ["state", "State"], ["preset", "Preset"], ["strategy", "Strategy"], [null, "Devices"],
    ["progress", "Progress"], ["value", "Loss"], ["started_at", "Started"], ["duration_s", "Duration"],
  ];
  const NUMBERS = ["value", "duration_s"];
  const STATES = ["queued", "starting", "running", "stopping", "done", "stopped", "failed"];

  const search = make("input", { type: "search", value: view.words, placeholder: "id, preset, strategy, cause", oninput: later });
  const states = make("select", { "aria-label": "State", onchange: () => change({ state: states.value, page: 0 }) });
  const order = make("select", { "aria-label": "Sort by", onchange: () => change({ sort: order.value, down: order.value !== "id", page: 0 }) },
    ...COLUMNS.filter(([key]) => key).map(([key, name]) => make("option", { value: key }, name)));
  const turn = make("button", { type: "button", class: "ts-button", "aria-label": "Reverse the order", onclick: () => change({ down: !view.down, page: 0 }) });
  const compare = make("a", { class: "ts-button", href: "#", "aria-disabled": "true" }, "Compare");
  const compareHint = make("span", { class: "ts-note" }, "Tick two or more runs to compare them.");
  const status = make("p", { class: "ts-note", role: "status" });
  const head = make("tr", {});
  const body = make("tbody", {});
  const pager = make("nav", { class: "ts-pager", "aria-label": "Pages of the table" });
  const showQueue = Live.queueList(root, server, () => refresh());
  const clear = make("button", { type: "button", class: "ts-button", hidden: true, onclick: () => {
    search.value = "";
    change({ words: "", state: "", page: 0 });
    search.focus();
  } }, "Show all runs");
  const welcome = make("div", { class: "ts-panel", hidden: true }, make("h2", {}, "No runs yet"),
    make("p", {}, "A run trains one model. Start one on the ", make("a", { href: "./" }, "Train page"), ": its demo takes about two minutes and needs no GPU."),
    make("p", { class: "ts-note" }, "In a terminal: ", make("code", {}, "tunesmith demo")));
  root.append(
    welcome,
    make("div", { class: "ts-tools" },
      make("label", {}, "Search ", search), make("label", {}, "State ", states),
      make("span", { class: "ts-narrow" }, make("label", {}, "Sort by ", order), turn), compare, compareHint),
    make("div", { class: "ts-tools" }, status, clear),
    make("div", { class: "ts-table ts-cards", tabindex: 0, role: "region", "aria-label": "Runs" },
      make("table", {}, make("thead", {}, head), body)),
    pager);

  let waiting;
  function later() {
    clearTimeout(waiting);
    waiting = setTimeout(() => change({ words: search.value, page: 0 }), 250);
  }

  function change(updates) {
    Object.assign(view, updates);
    const query = new URLSearchParams();
    if (view.state) query.set("state", view.state);
    if (view.words) query.set("q", view.words);
    if (view.sort !== "started_at") query.set("sort", view.sort);
    if (!view.down) query.set("down", "0");
    if (view.page) query.set("page", view.page);
    history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
    digest = "";
    refresh();
  }

  function choose(id, on) {
    on ? selected.add(id) : selected.delete(id);
    const ready = selected.size > 1;
    compare.textContent = selected.size ? `Compare ${selected.size}` : "Compare";
    compare.setAttribute("aria-disabled", String(!ready));
    compareHint.textContent = ready ? "" : selected.size ? "Tick one more run." : "Tick two or more runs to compare them.";
    compare.href = ready ? `compare?${new URLSearchParams({ runs: [...selected].join(",") })}` : "#";
  }
  compare.addEventListener("click", (event) => { if (selected.size < 2) event.preventDefault(); });

  // Made once, so that a header keeps the focus when it is pressed.
  const headers = COLUMNS.map(([key, name]) => {
    const press = () => change({ sort: key, down: view.sort === key ? !view.down : key !== "id", page: 0 });
    const label = key ? make("button", { type: "button", class: "ts-sort", onclick: press }, name) : name;
    return { key, cell: make("th", { scope: "col", class: NUMBERS.includes(key) ? "ts-number" : null }, label) };
  });
  head.append(make("th", { scope: "col" }, make("span", { class: "ts-unseen" }, "Compare")), ...headers.map(({ cell }) => cell));

  function drawHead(rows) {
    const measures = ["loss", "reward"].filter((name) => rows.some((row) => row.measure === name)).join(" or ") || "loss";
    for (const { key, cell } of headers) {
      if (key === "value") cell.firstChild.textContent = capitalised(measures);
      const isActive = key && view.sort === key;
      if (isActive) cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    order.value = view.sort;
    turn.textContent = view.down ? "↓" : "↑";
  }

  // As many digits for all, so that a column of losses can be compared.
  const valueText = (value) => (value != null && Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4 ? value.toPrecision(4) : numberText(value));

  const capitalised = (word) => word[0].toUpperCase() + word.slice(1);

  function spark(row) {
    const values = row.sparkline, low = Math.min(...values), high = Math.max(...values);
    const text = make("span", {}, valueText(row.value), row.measure === "reward" ? make("span", { class: "ts-beside" }, "reward") : null);
    if (values.length < 2) return text;
    const points = values.map((value, index) =>
      `${((index / (values.length - 1)) * 88 + 1).toFixed(1)},${(high > low ? 19 - ((value - low) / (high - low)) * 18 : 10).toFixed(1)}`);
    const label = `${row.measure} from ${valueText(values[0])} to ${valueText(row.value)}`;
    return make("span", { class: "ts-loss" },
      make("svg", { viewBox: "0 0 90 20", width: 72, preserveAspectRatio: "none", height: 20, role: "img", "aria-label": label },
        make("polyline", { points: points.join(" ") })),
      text);
  }

  function progress(row) {
    if (row.total_steps == null) return make("span", {}, row.step ? `step ${row.step}` : "-");
    const label = `${row.step ?? 0} / ${row.total_steps}`;
    const full = Math.round(100 * (row.progress || 0));
    return make("span", { class: "ts-metered" },
      make("span", { class: "ts-meter", role: "meter", "aria-label": "progress", "aria-valuemin": 0, "aria-valuemax": 100,
        "aria-valuenow": full, "aria-valuetext": `${label} steps` }, make("span", { class: "ts-meter-fill", style: `width:${full}%` })),
      make("span", { class: "ts-meter-words" }, label));
  }

  // Most presets end with their method.
  const preset = ({ preset: name, method }) => [name, name?.endsWith(`-${method}`) ? null : method].filter(Boolean).join(" · ") || "-";

  function drawRow(row) {
    const tick = make("input", { type: "checkbox", "aria-label": `compare ${row.id}`, onchange: () => choose(row.id, tick.checked) });
    tick.checked = selected.has(row.id);
    const devices = row.gpus.length ? `GPU ${row.gpus.join(", ")}` : row.world_size ? `${row.world_size} CPU` : "-";
    const time = make("span", { "data-since": row.duration_s == null ? row.started_at : null }, durationText(row.duration_s));
    const cells = [
      make("span", {}, make("a", { href: runPage(row.id) }, row.id),
        row.cause && row.state === "failed" ? make("span", { class: "ts-cause", title: row.cause }, row.cause) : null),
      badge(row.state), preset(row), row.strategy || "-", devices,
      progress(row), spark(row), timeText(row.started_at), time,
    ];
    return make("tr", {}, make("td", { class: "ts-tick" }, tick),
      ...cells.map((cell, index) => make("td", { "data-name": COLUMNS[index][0] === "value" ? capitalised(row.measure) : COLUMNS[index][1], class: NUMBERS.includes(COLUMNS[index][0]) ? "ts-number" : null }, cell)));
  }

  function drawPager(answer) {
    const go = (page, label) => make("button", { type: "button", class: "ts-button", onclick: () => change({ page }) }, label);
    pager.replaceChildren(...(answer.pages < 2 ? [] : [
      answer.page > 0 ? go(answer.page - 1, "Previous") : null,
      make("span", {}, `page ${answer.page + 1} of ${answer.pages}`),
      answer.page + 1 < answer.pages ? go(answer.page + 1, "Next") : null,
    ].filter(Boolean)));
  }

  function draw(answer) {
    const count = Object.values(answer.counts).reduce((sum, entry) => sum + entry, 0);
    states.replaceChildren(make("option", { value: "" }, `all (${count})`),
      ...STATES.filter((state) => answer.counts[state] || state === view.state)
        .map((state) => make("option", { value: state }, `${state} (${answer.counts[state] || 0})`)));
    states.value = view.state;
    welcome.hidden = count > 0;
    for (const part of [...root.querySelectorAll(".ts-tools, .ts-cards"), pager]) part.hidden = !count;
    root.querySelector(".ts-cards").hidden = !answer.total;
    clear.hidden = answer.total > 0;
    status.textContent = answer.total ? `${answer.total} of ${count} runs` : "No run matches the search and the state.";
    showQueue(answer.queue);
    const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement : null;
    const key = focused && (focused.getAttribute("aria-label") || focused.getAttribute("href"));
    drawHead(answer.rows);
    body.replaceChildren(...answer.rows.map(drawRow));
    drawPager(answer);
    live = [...body.querySelectorAll("[data-since]")];
    if (key) [...body.querySelectorAll("input, a")].find((control) => [control.getAttribute("aria-label"), control.getAttribute("href")].includes(key))?.focus();
  }

  const refresh = poll(root, async () => {
    const answer = await server.runs_table({ ...view, digest });
    if (answer.error) status.textContent = answer.error;
    else if (!answer.same) draw(answer);
    digest = answer.digest || "";
    for (const cell of live) cell.textContent = durationText((Date.now() - new Date(cell.dataset.since)) / 1000);
  }, 3);
  drawHead([]);
};
