// These parts are asked for a screen before they come into sight: what fills in sight would move what lies below it.
const AHEAD = { rootMargin: "100% 0px" };

// One small chart per rank, all on the same axes, and the memory that was planned beside what was measured.
Live.ranks = (element, server) => {
  const { make, poll, follow, numberText, alignedTexts } = Live;
  const root = element.querySelector(".ts-ranks");
  const id = new URLSearchParams(location.search).get("run") || "";
  const NAMES = { local_work: "Own work, share of the time", memory_gib: "Memory, GiB", memory_reserved_gib: "Memory reserved, GiB",
    host_memory_gib: "Host memory, GiB", gpu_percent: "GPU use, %", gpu_power_w: "GPU power, W" };
  const WIDTH = 160, HEIGHT = 56;
  const metric = make("select", { onchange: reload });
  const every = make("button", { type: "button", class: "ts-button", hidden: "", onclick: () => { all = !all; reload(); } });
  const status = make("p", { class: "ts-note", role: "status" });
  const grid = make("div", { class: "ts-rank-grid" });
  const heading = root.previousElementSibling;
  const tools = make("div", { class: "ts-tools ts-awaited" }, make("label", {}, "Metric ", metric), every);
  status.textContent = "Loading…";
  root.append(tools, status, grid);
  let all = false, token = null, answer = null, cells = [], summary = "", pointed = null;

  function reload() {
    token = null;
    refresh();
  }

  function sentence() {
    const slow = answer.ranks.filter((entry) => entry.slow), worst = slow.sort((a, b) => b.slow - a.slow)[0];
    const count = answer.ranks.length, kept = answer.kept < answer.world ? `; curves are kept of ranks 0 to ${answer.kept - 1}` : "";
    const shown = count < answer.world ? `${count} of ${answer.world} ranks${all ? "" : ": those furthest from the median"}${kept}. ` : "";
    const named = worst ? `Slowest: rank ${worst.rank}, found slow ${worst.slow === 1 ? "once" : `${worst.slow} times`}.`
      : answer.metric === "local_work" ? `No rank was found slow; rank ${answer.highest} works longest before it waits for others.`
        : `No rank was found slow; rank ${answer.highest} has the highest mean.`;
    return shown + named;
  }

  function draw() {
    if (metric.childElementCount !== answer.metrics.length)
      metric.replaceChildren(...answer.metrics.map((key) => make("option", { value: key }, NAMES[key])));
    metric.value = answer.metric;
    every.hidden = answer.kept <= 8;
    every.textContent = all ? "Show fewer" : `Show all ${answer.kept}`;
    const values = answer.ranks.flatMap((entry) => entry.values).filter((value) => value != null);
    const high = Math.max(...values), low = Math.min(0, ...values), span = high - low || 1;
    const first = answer.steps[0], length = answer.steps.at(-1) - first || 1;
    const at = (step) => (WIDTH * (step - first)) / length;
    summary = `${sentence()} Each chart goes from ${numberText(low)} to ${numberText(high)}.`;
    const last = alignedTexts(answer.ranks.map((entry) => entry.values.findLast((value) => value != null)));
    cells = answer.ranks.map((entry, number) => {
      const points = entry.values.map((value, index) => value == null ? null
        : `${at(answer.steps[index]).toFixed(1)},${(HEIGHT - 1 - ((value - low) / span) * (HEIGHT - 2)).toFixed(1)}`).filter(Boolean);
      const known = entry.values.filter((value) => value != null);
      const label = `rank ${entry.rank}: ${NAMES[answer.metric]} from ${numberText(known[0])} to ${numberText(known.at(-1))}`;
      const value = make("span", {}, last[number]);
      const line = make("span", { class: "ts-rank-cursor", hidden: "" });
      const drawn = points.length > 1 ? make("polyline", { points: points.join(" ") })
        : make("circle", { cx: 2, cy: points.length ? points[0].split(",")[1] : HEIGHT, r: 2 });
      const plot = make("div", { class: "ts-rank-plot" },
        make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, drawn), line);
      const name = entry.slow ? `rank ${entry.rank}, slow` : `rank ${entry.rank}`;
      const box = make("figure", { class: `ts-rank${entry.slow ? " ts-rank-slow" : ""}` }, make("figcaption", {}, make("span", {}, name), value), plot);
      return { box, plot, line, value, entry, last: last[number] };
    });
    grid.replaceChildren(...cells.map((cell) => cell.box));
    show(pointed);
  }

  // All charts show the same step, that of the pointer: here, or in the charts of the run. Returns the logged step.
  function show(step) {
    pointed = step;
    if (!answer) return step;
    const index = step == null ? null
      : answer.steps.reduce((best, value, number) => Math.abs(value - step) < Math.abs(answer.steps[best] - step) ? number : best, 0);
    const logged = answer.steps[index], first = answer.steps[0], length = answer.steps.at(-1) - first || 1;
    status.textContent = `${summary} ${step == null ? "The last values:" : `At step ${numberText(logged)}:`}`;
    const texts = index == null ? [] : alignedTexts(cells.map(({ entry }) => entry.values[index]));
    for (const [number, { line, value, last }] of cells.entries()) {
      line.hidden = step == null;
      if (step != null) line.style.left = `${(100 * (logged - first)) / length}%`;
      value.textContent = step == null ? last : texts[number];
    }
    return logged;
  }
  const tellOthers = follow(show);
  grid.addEventListener("pointermove", (event) => {
    const plot = event.target.closest?.(".ts-rank-plot");
    if (!plot || !answer) return;
    const box = plot.getBoundingClientRect(), first = answer.steps[0], length = answer.steps.at(-1) - first || 1;
    tellOthers(show(first + ((event.clientX - box.left) / box.width) * length));
  });
  grid.addEventListener("pointerleave", () => {
    show(null);
    tellOthers(null);
  });

  let visible = false;
  const refresh = poll(root, async () => {
    if (!visible) return;
    const fresh = await server.rank_curves({ run: id, metric: metric.value, every: all, since: token });
    if (fresh.error || fresh.same) return;
    [token, answer] = [fresh.token, fresh];
    root.hidden = heading.hidden = fresh.world < 2 || !fresh.metric;
    tools.classList.remove("ts-awaited");
    if (!root.hidden) draw();
  }, 4);
  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    refresh();
  }, AHEAD).observe(element);
};

Live.memory = (element, server) => {
  const { make, poll, gibText } = Live;
  const root = element.querySelector(".ts-memory");
  const id = new URLSearchParams(location.search).get("run") || "";
  const button = make("button", { type: "button", class: "ts-button", onclick: () => { planned = true; refresh(); } }, "Compare with the plan");
  const status = make("p", { class: "ts-note", role: "status" });
  const table = make("div", { class: "ts-table", "data-sort": true, tabindex: 0, role: "region", "aria-label": "Memory by rank" });
  root.append(make("div", { class: "ts-tools" }, button), status, table);
  let planned = false, shown = "";

  const bar = (share, label) => make("span", { class: "ts-metered" },
    make("span", { class: "ts-meter" }, make("span", { class: "ts-meter-fill", style: `width:${(100 * Math.min(1, share)).toFixed(1)}%` })),
    make("span", { class: "ts-meter-words" }, label));

  function draw(answer) {
    const key = JSON.stringify(answer);
    if (key === shown) return;
    shown = key;
    button.hidden = answer.planned || answer.counting || !!answer.error;
    const more = answer.world > answer.rows.length ? ` Ranks 0 to ${answer.rows.length - 1} of ${answer.world} are listed.` : "";
    status.textContent = answer.counting ? "Counting the model; this takes some seconds."
      : answer.error ? `No plan: ${answer.error}` : answer.rows.length ? answer.note + more : "No rank has logged its memory yet.";
    table.hidden = !answer.rows.length;
    const most = Math.max(...answer.rows.flatMap((row) => [row.measured_gib || 0, row.planned_gib || 0]), 1e-9);
    const columns = [["Rank", (row) => row.rank], ["Measured", (row) => bar((row.measured_gib || 0) / most, gibText(row.measured_gib))]];
    if (answer.kind === "gpu") columns.push(["Reserved", (row) => gibText(row.reserved_gib)]);
    if (answer.planned) {
      columns.push(["Planned", (row) => bar((row.planned_gib || 0) / most, gibText(row.planned_gib))]);
      if (answer.kind === "cpu") columns.push(["Of it in every process", (row) => gibText(row.runtime_gib)]);
      columns.push([answer.kind === "cpu" ? "Planned / measured, both without that" : "Planned / measured",
        (row) => (row.ratio == null ? "not comparable" : row.ratio.toFixed(2))]);
    }
    table.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...columns.map(([name]) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...answer.rows.map((row) => make("tr", {}, ...columns.map(([, cell]) => make("td", {}, cell(row))))))));
  }

  let visible = false;
  const refresh = poll(root, async () => {
    if (!visible) return;
    const answer = await server.memory({ run: id, plan: planned });
    if (answer.error && !answer.rows) { status.textContent = answer.error; return; }
    draw(answer);
  }, 5);
  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    refresh();
  }, AHEAD).observe(element);
};
