// Keeps values in the address, so that a reload or a shared link shows the same view.
Live.remember = (values) => {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) value ? query.set(name, value) : query.delete(name);
  history.replaceState(null, "", `${location.pathname}?${query}`);
};

// One metric of several runs on one axis; runs that differ in the seed only can be drawn as their mean and range.
Live.compare = (element, server) => {
  const { make, poll, merged, smoothed, isSmoothed, Chart, chartTools, remember } = Live;
  const root = element.querySelector(".ts-charts");
  const METRICS = { loss: "Loss", eval_loss: "Evaluation loss", learning_rate: "Learning rate", grad_norm: "Gradient norm",
    tokens_per_second: "Tokens per second", memory_gib: "Memory, GiB", eval_token_accuracy: "Evaluation accuracy",
    mfu: "Peak speed used (MFU)", aux_loss: "Load balancing loss",
    reward_accuracy: "Preference accuracy", eval_reward_accuracy: "Evaluation preference accuracy",
    reward: "Reward of sampled answers", eval_reward: "Evaluation reward", answer_tokens: "Tokens of an answer",
    reward_margin: "Reward margin", eval_reward_margin: "Evaluation reward margin",
    kl: "KL divergence", eval_kl: "Evaluation KL divergence" };
  const params = new URLSearchParams(location.search);
  const ids = [...new Set((params.get("runs") || "").split(",").filter(Boolean))].slice(0, 8);
  if (!ids.length) { root.hidden = true; return; }
  // An id without its date is short enough for the chart's edge; the legend has the rest.
  const undated = ids.map((id) => id.replace(/^\d{8}-\d{6}-/, "")), names = new Set(undated).size === ids.length ? undated : ids;
  const read = chartTools(root, METRICS, draw);
  const tools = root.querySelector(".ts-tools"), metric = tools.querySelector("select");
  if (params.get("metric") in METRICS) metric.value = params.get("metric");
  metric.addEventListener("input", () => remember({ metric: metric.value }));
  const band = make("input", { type: "checkbox" });
  band.checked = params.get("seeds") === "band";
  band.addEventListener("input", () => { remember({ seeds: band.checked && "band" }); draw(read()); });
  const bandLabel = make("label", { hidden: true }, band, " Seeds as mean and range");
  const download = make("button", { type: "button", class: "ts-button", onclick: save }, "Download CSV");
  tools.append(bandLabel, download);
  const status = make("p", { class: "ts-note", role: "status" });
  root.append(status);
  const chart = new Chart(root, "Curves", { height: 380 });
  const data = new Map();
  let groups = [];

  async function save() {
    const answer = await server.table({ runs: ids.join(",") }).catch(() => ({ error: "no answer from the server; try again" }));
    if (answer.error) { status.hidden = false; status.textContent = answer.error; return; }
    const link = make("a", { href: URL.createObjectURL(new Blob([answer.csv], { type: "text/csv" })), download: "runs.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function curve(id, { metric: name, axis }) {
    const run = data.get(id), kind = name.startsWith("eval_") ? "eval" : "train";
    const values = run?.[kind][name];
    return values && { kind, step: run[kind].step, x: run[kind][axis], y: values.mean };
  }

  // Mean, lowest and highest over the steps that all of them have.
  function spread(curves, smooth) {
    const at = curves.map(({ step, x, y }) => {
      const values = smooth(y);
      return new Map(step.map((one, index) => [one, [x[index], values[index]]]).filter(([, [, value]]) => value != null));
    });
    const line = { x: [], y: [], low: [], high: [] };
    for (const one of at[0].keys()) {
      if (!at.every((points) => points.has(one))) continue;
      const pairs = at.map((points) => points.get(one)), values = pairs.map(([, value]) => value);
      const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
      line.x.push(mean(pairs.map(([x]) => x)));
      line.y.push(mean(values));
      line.low.push(Math.min(...values));
      line.high.push(Math.max(...values));
    }
    return line;
  }

  function draw(options) {
    const lines = [], missing = [];
    const banded = band.checked ? groups : [];
    ids.forEach((id, colour) => {
      const found = curve(id, options);
      if (!found) { if (data.has(id)) missing.push(id); return; }
      const group = banded.find((one) => one.runs.includes(id));
      const dots = found.kind === "eval", smooth = isSmoothed(options.metric, found.kind, options);
      if (group) {
        const members = group.runs.map((run) => curve(run, options)).filter(Boolean);
        if (group.runs.find((run) => curve(run, options)) !== id) return;  // drawn with the first of its group
        const smoothing = (values) => (smooth ? smoothed(values, options.smooth) : values);
        lines.push({ label: `${group.label}: mean of ${members.length} seeds`, colour, dots, ...spread(members, smoothing) });
        return;
      }
      if (smooth) lines.push({ label: `${id}, as logged`, x: found.x, y: found.y, colour, faint: true });
      lines.push({ label: id, name: names[colour], x: found.x, y: smooth ? smoothed(found.y, options.smooth) : found.y, colour, dots });
    });
    chart.name = METRICS[options.metric];
    chart.box.querySelector("figcaption").textContent = chart.name;
    status.textContent = !lines.length ? "None of these runs has logged this metric; choose another." : missing.length ? `Not logged by ${missing.join(", ")}.` : "";
    status.hidden = !status.textContent;
    chart.show(lines, { axis: options.axis, log: options.log });
  }

  const refresh = poll(root, async () => {
    let more = false, changed = !data.size;
    for (const id of ids) {
      const before = data.get(id);
      const answer = await server.curves({ run: id, since: before?.token });
      if (answer.error) continue;
      if (!answer.same) data.set(id, merged(before, answer));
      changed ||= !answer.same;
      more ||= answer.more;
    }
    if (changed) {
      groups = (await server.groups({ runs: ids.join(",") })).groups || [];
      bandLabel.hidden = !groups.length;
      draw(read());
    }
    if (more) setTimeout(refresh, 50);
  }, 3);
};
