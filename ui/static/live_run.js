// The charts of one run.
Live.run = (element, server) => {
  const { make, poll, merged, smoothed, isSmoothed, Chart, chartTools } = Live;
  const box = element.querySelector(".ts-charts");
  const id = new URLSearchParams(location.search).get("run") || "";
  const read = chartTools(box, null, draw);
  const said = make("p", { class: "ts-note", role: "status" });
  const grid = make("div", { class: "ts-chart-grid" });
  box.append(said, grid);
  const CHARTS = [
    ["Loss", [["train", "loss", "train"], ["eval", "eval_loss", "evaluation"]], true],
    ["Learning rate", [["train", "learning_rate", "learning rate"]], false],
    ["Gradient norm", [["train", "grad_norm", "gradient norm"]], true],
    ["Tokens per second", [["train", "tokens_per_second", "all"], ["train", "trained_tokens_per_second", "trained"]], false],
    ["Memory, GiB", [["train", "memory_gib", "largest rank"]], false],
    ["Evaluation accuracy", [["eval", "eval_token_accuracy", "of tokens"]], false],
    ["MFU", [["train", "mfu", "MFU"]], false],
  ].map(([name, lines, logs]) => ({ name, lines, logs, chart: new Chart(grid, name) }));
  let kept = null;

  function draw(how) {
    if (!kept) return;
    const train = kept.train;
    const along = (step) => {
      if (how.axis === "step") return step;
      const index = train.step.findIndex((one) => one >= step);
      return index < 0 ? null : train[how.axis][index];
    };
    const marks = kept.attempts.slice(1).map(([attempt, step]) => ({ x: along(step), label: `attempt ${attempt + 1}` }));
    for (const { name, lines, logs, chart } of CHARTS) {
      const shown = [];
      lines.forEach(([kind, key, label], colour) => {
        const values = kept[kind][key];
        if (!values) return;
        const x = kept[kind][how.axis], dots = kind === "eval";
        const smooth = isSmoothed(key, kind, how);
        shown.push({ label: smooth ? `${label}, as logged` : label, x, y: values.mean, low: values.min, high: values.max, colour, faint: smooth, dots });
        if (smooth) shown.push({ label, x, y: smoothed(values.mean, how.smooth), colour });
      });
      if (name === "Loss")
        for (const piece of kept.replaced || [])
          shown.push({ label: `replaced, attempt ${piece.attempt + 1}`, x: piece.step.map(along), y: piece.loss, colour: 7, faint: true });
      chart.show(shown, { axis: how.axis, log: how.log && logs, marks });
    }
  }

  const look = poll(box, async () => {
    const answer = await server.curves({ run: id, since: kept?.token });
    if (answer.error) { said.textContent = answer.error; return; }
    if (!answer.same) kept = merged(kept, answer);
    said.textContent = !answer.rows ? "No metrics yet." : answer.more ? `reading the metrics: ${answer.rows} rows so far` : "";
    said.hidden = !said.textContent;
    if (!answer.same) draw(read());
    if (answer.more) setTimeout(look, 50);
  }, 2);
};
