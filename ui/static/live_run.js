// The charts of one run.
Live.run = (element, server) => {
  const { make, poll, follow, merged, smoothed, isSmoothed, Chart, ChartGroup, chartTools } = Live;
  const root = element.querySelector(".ts-charts");
  const id = new URLSearchParams(location.search).get("run") || "";
  const read = chartTools(root, null, draw);
  const status = make("p", { class: "ts-note", role: "status" });
  const grid = make("div", { class: "ts-chart-grid" });
  const whole = make("button", { class: "ts-button", type: "button", hidden: "" }, "Show the whole run");
  const group = new ChartGroup((range) => { whole.hidden = !range; }, (x) => tellOthers(x == null ? null : stepAt(x)));
  const tellOthers = follow((step) => group.pointTo(step == null || !data ? null : toAxis(step)));
  whole.addEventListener("click", () => group.zoomTo(null));
  root.querySelector(".ts-tools").append(whole);
  root.append(status, grid);
  const CHARTS = [
    ["Loss", [["train", "loss", "train"], ["eval", "eval_loss", "evaluation"]], true],
    ["Load balancing loss", [["train", "aux_loss", "of all experts, without its coefficient"]], false],
    ["Learning rate", [["train", "learning_rate", "learning rate"]], false],
    ["Gradient norm", [["train", "grad_norm", "gradient norm"]], true],
    ["Tokens per second", [["train", "tokens_per_second", "all"], ["train", "trained_tokens_per_second", "trained"]], false],
    ["Memory, GiB", [["train", "memory_gib", "largest rank"], ["train", "memory_reserved_gib", "reserved, mean of ranks"]], false],
    ["Host memory, GiB", [["train", "host_memory_gib", "mean of ranks"]], false],
    ["GPU use, %", [["train", "gpu_percent", "mean of ranks"]], false],
    ["GPU power, W", [["train", "gpu_power_w", "mean of ranks"]], false],
    ["Waiting for data, share of the time", [["train", "data_wait", "all ranks"]], false],
    ["Evaluation accuracy", [["eval", "eval_token_accuracy", "of tokens"]], false],
    ["MFU", [["train", "mfu", "MFU"]], false],
  ].map(([name, lines, logs]) => ({ name, lines, logs, chart: new Chart(grid, name, { group }) }));
  let data = null, shownAxis = null;

  // A step on the x axis that is shown; null where nothing was logged.
  function toAxis(step) {
    if (shownAxis === "step") return step;
    const index = data.train.step.findIndex((value) => value >= step);
    return index < 0 ? null : data.train[shownAxis][index];
  }

  // The logged step that is nearest to a place on the x axis.
  function stepAt(x) {
    const distances = data.train[shownAxis].map((value) => (value == null ? Infinity : Math.abs(value - x)));
    return data.train.step[distances.indexOf(Math.min(...distances))];
  }

  function draw(options) {
    if (!data) return;
    if (shownAxis !== options.axis && group.zoom) group.zoomTo(null);  // a range of steps is none of tokens
    shownAxis = options.axis;
    const marks = data.attempts.slice(1).map(([attempt, step]) => ({ x: toAxis(step), label: `attempt ${attempt + 1}` }));
    const saved = (data.checkpoints || []).map((step) => ({ x: toAxis(step), label: "" }));
    for (const { name, lines, logs, chart } of CHARTS) {
      const series = [];
      lines.forEach(([kind, key, label], colour) => {
        const values = data[kind][key];
        if (!values) return;
        const x = data[kind][options.axis], dots = kind === "eval";
        const smooth = isSmoothed(key, kind, options);
        series.push({ label: smooth ? `${label}, as logged` : label, x, y: values.mean, low: values.min, high: values.max, colour, faint: smooth, dots });
        if (smooth) series.push({ label, x, y: smoothed(values.mean, options.smooth), colour });
      });
      if (name === "Loss")
        for (const curve of data.replaced || [])
          series.push({ label: `replaced, attempt ${curve.attempt + 1}`, x: curve.step.map(toAxis), y: curve.loss, colour: 7, faint: true });
      chart.show(series, { axis: options.axis, log: options.log && logs, marks: name === "Loss" ? [...marks, ...saved] : marks });
    }
  }

  const refresh = poll(root, async () => {
    const answer = await server.curves({ run: id, since: data?.token });
    if (answer.error) { status.textContent = answer.error; return; }
    if (!answer.same) data = merged(data, answer);
    status.textContent = !answer.rows ? "No metrics yet." : answer.more ? `reading the metrics: ${answer.rows} rows so far` : "";
    status.hidden = !status.textContent;
    if (!answer.same) draw(read());
    if (answer.more) setTimeout(refresh, 50);
  }, 2);
};
