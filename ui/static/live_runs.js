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
    ["progress", "Progress"], ["loss", "Loss"], ["started_at", "Started"], ["duration_s", "Duration"],
  ];
  const STATES = ["queued", "starting", "running", "stopping", "done", "stopped", "failed"];

  const search = make("input", { type: "search", value: view.words, placeholder: "id, preset, strategy, cause", oninput: later });
  const states = make("select", { "aria-label": "State", onchange: () => change({ state: states.value, page: 0 }) });
  const order = make("select", { "aria-label": "Sort by", onchange: () => change({ sort: order.value, down: order.value !== "id", page: 0 }) },
    ...COLUMNS.filter(([key]) => key).map(([key, name]) => make("option", { value: key }, name)));
  const compare = make("a", { class: "ts-button", href: "#", "aria-disabled": "true" }, "Compare");
  const status = make("p", { class: "ts-note", role: "status" });
  const head = make("tr", {});
  const body = make("tbody", {});
  const pager = make("nav", { class: "ts-pager", "aria-label": "Pages of the table" });
  root.append(
    make("div", { class: "ts-tools" },
      make("label", {}, "Search ", search), make("label", {}, "State ", states),
      make("label", { class: "ts-narrow" }, "Sort by ", order), compare),
    status,
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
    compare.title = ready ? "" : "tick two or more runs";
    compare.href = ready ? `compare?${new URLSearchParams({ runs: [...selected].join(",") })}` : "#";
  }
  compare.addEventListener("click", (event) => { if (selected.size < 2) event.preventDefault(); });

  function drawHead() {
    head.replaceChildren(make("th", { scope: "col" }, make("span", { class: "ts-unseen" }, "Compare")),
      ...COLUMNS.map(([key, name]) => {
        if (!key) return make("th", { scope: "col" }, name);
        const isActive = view.sort === key;
        const turn = () => change({ sort: key, down: isActive ? !view.down : key !== "id", page: 0 });
        const mark = make("span", { "aria-hidden": "true" }, isActive ? (view.down ? " ↓" : " ↑") : "");
        return make("th", { scope: "col", "aria-sort": isActive ? (view.down ? "descending" : "ascending") : null },
          make("button", { type: "button", onclick: turn }, name, mark));
      }));
    order.value = view.sort;
  }

  function spark(row) {
    const values = row.sparkline, low = Math.min(...values), high = Math.max(...values);
    if (values.length < 2) return make("span", {}, numberText(row.loss));
    const points = values.map((value, index) =>
      `${((index / (values.length - 1)) * 88 + 1).toFixed(1)},${(high > low ? 19 - ((value - low) / (high - low)) * 18 : 10).toFixed(1)}`);
    const label = `loss from ${numberText(values[0])} to ${numberText(row.loss)}`;
    return make("span", { class: "ts-loss" },
      make("svg", { viewBox: "0 0 90 20", width: 90, height: 20, role: "img", "aria-label": label },
        make("polyline", { points: points.join(" ") })),
      make("span", {}, numberText(row.loss)));
  }

  function progress(row) {
    if (row.total_steps == null) return make("span", {}, row.step ? `step ${row.step}` : "-");
    const label = `${row.step ?? 0} / ${row.total_steps}`;
    const full = Math.round(100 * (row.progress || 0));
    return make("span", { class: "ts-metered" },
      make("span", { class: "ts-meter", role: "meter", "aria-label": "progress", "aria-valuemin": 0, "aria-valuemax": 100,
        "aria-valuenow": full, "aria-valuetext": label }, make("span", { class: "ts-meter-fill", style: `width:${full}%` })),
      make("span", { class: "ts-meter-words" }, label));
  }

  function drawRow(row) {
    const tick = make("input", { type: "checkbox", "aria-label": `compare ${row.id}`, onchange: () => choose(row.id, tick.checked) });
    tick.checked = selected.has(row.id);
    const devices = row.gpus.length ? `GPU ${row.gpus.join(", ")}` : row.world_size ? `${row.world_size} CPU` : "-";
    const time = make("span", { "data-since": row.duration_s == null ? row.started_at : null }, durationText(row.duration_s));
    const cells = [
      make("span", {}, make("a", { href: runPage(row.id) }, row.id),
        row.cause && row.state === "failed" ? make("span", { class: "ts-cause", title: row.cause }, row.cause) : null),
      badge(row.state), [row.preset, row.method].filter(Boolean).join(" · ") || "-", row.strategy || "-", devices,
      progress(row), spark(row), timeText(row.started_at), time,
    ];
    return make("tr", {}, make("td", { class: "ts-tick" }, tick),
      ...cells.map((cell, index) => make("td", { "data-name": COLUMNS[index][1] }, cell)));
  }

  function drawPager(answer) {
    const go = (page, label) => make("button", { type: "button", class: "ts-button", onclick: () => change({ page }) }, label);
    pager.replaceChildren(...(answer.pages < 2 ? [] : [
      answer.page > 0 ? go(answer.page - 1, "Newer") : null,
      make("span", {}, `page ${answer.page + 1} of ${answer.pages}`),
      answer.page + 1 < answer.pages ? go(answer.page + 1, "More") : null,
    ].filter(Boolean)));
  }

  function draw(answer) {
    const count = Object.values(answer.counts).reduce((sum, entry) => sum + entry, 0);
    states.replaceChildren(make("option", { value: "" }, `all (${count})`),
      ...STATES.filter((state) => answer.counts[state] || state === view.state)
        .map((state) => make("option", { value: state }, `${state} (${answer.counts[state] || 0})`)));
    states.value = view.state;
    status.textContent = !count ? "No runs yet: start one on the Train page, or with tunesmith demo."
      : answer.total ? `${answer.total} of ${count} runs` : "No matching runs: change the search or the state.";
    const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement : null;
    const key = focused && (focused.getAttribute("aria-label") || focused.getAttribute("href"));
    drawHead();
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
  drawHead();
};
