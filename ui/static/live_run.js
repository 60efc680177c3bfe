// The charts of one run.
Live.run = (element, server) => {
  const { make, poll, merged, smoothed, isSmoothed, Chart, chartTools } = Live;
  const root = element.querySelector(".ts-charts");
  const id = new URLSearchParams(location.search).get("run") || "";
  const read = chartTools(root, null, draw);
  const status = make("p", { class: "ts-note", role: "status" });
  const grid = make("div", { class: "ts-chart-grid" });
  root.append(status, grid);
  const CHARTS = [
    ["Loss", [["train", "loss", "train"], ["eval", "eval_loss", "evaluation"]], true],
    ["Load balancing loss", [["train", "aux_loss", "of all experts, without its coefficient"]], false],
    ["Learning rate", [["train", "learning_rate", "learning rate"]], false],
    ["Gradient norm", [["train", "grad_norm", "gradient norm"]], true],
    ["Tokens per second", [["train", "tokens_per_second", "all"], ["train", "trained_tokens_per_second", "trained"]], false],
    ["Memory, GiB", [["train", "memory_gib", "largest rank"]], false],
    ["Evaluation accuracy", [["eval", "eval_token_accuracy", "of tokens"]], false],
    ["MFU", [["train", "mfu", "MFU"]], false],
  ].map(([name, lines, logs]) => ({ name, lines, logs, chart: new Chart(grid, name) }));
  let data = null;

  function draw(options) {
    if (!data) return;
    const train = data.train;
    const toAxis = (step) => {
      if (options.axis === "step") return step;
      const index = train.step.findIndex((value) => value >= step);
      return index < 0 ? null : train[options.axis][index];
    };
    const marks = data.attempts.slice(1).map(([attempt, step]) => ({ x: toAxis(step), label: `attempt ${attempt + 1}` }));
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
      chart.show(series, { axis: options.axis, log: options.log && logs, marks });
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
