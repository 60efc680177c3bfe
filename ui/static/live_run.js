// The charts of one run.
Live.run = (element, server) => {
  const { make, poll, follow, merged, smoothed, isSmoothed, Chart, ChartGroup, chartTools, gibText, percentText } = Live;
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
    ["Reward of sampled answers", "What training raises: the mean over the answers of a step.",
      [["train", "reward", "train"], ["eval", "eval_reward", "evaluation"]], false],
    ["Loss", "How far the predictions are from the data; lower is better.",
      [["train", "loss", "train"], ["eval", "eval_loss", "evaluation"]], true],
    ["Preference accuracy", "Share of the pairs whose chosen answer has the higher reward, or of the answers whose reward fits their label.",
      [["train", "reward_accuracy", "train"], ["eval", "eval_reward_accuracy", "evaluation"]], false],
    ["Reward margin", "By how much the reward of chosen or desirable answers is above that of the others.",
      [["train", "reward_margin", "train"], ["eval", "eval_reward_margin", "evaluation"]], false],
    ["Rewards", "How much more likely than before training the model finds each answer.",
      [["train", "reward_chosen", "chosen"], ["train", "reward_rejected", "rejected"],
        ["train", "reward_desirable", "desirable"], ["train", "reward_undesirable", "undesirable"]], false],
    ["KL divergence", "How far the model is from the one that it starts from, or from its teacher.",
      [["train", "kl", "train"], ["eval", "eval_kl", "evaluation"]], false],
    ["Prompts and answers that teach little", "Prompts whose answers all got the same reward, and answers that were cut.",
      [["train", "equal_groups", "share of prompts with equal rewards"], ["train", "truncated", "share of answers cut"]], false],
    ["Tokens of an answer", "Mean over the answers of a step.",
      [["train", "answer_tokens", "train"], ["eval", "eval_answer_tokens", "evaluation"]], false],
    ["Sampler and trainer", "How far their log-probabilities of a token differ; a large gap means that answers are stale.",
      [["train", "sampler_difference", "mean difference"]], true],
    ["Clipped, share", "Answers, or their tokens, that have moved as far as a step may move them.", [["train", "clip_ratio", "clipped"]], false],
    ["Seconds of a step before training", "Sampling answers, and computing their rewards.",
      [["train", "sampling_s", "sampling"], ["train", "rewards_s", "rewards"]], false],
    ["Load balancing loss", "Lowest when all experts get as much work.", [["train", "aux_loss", "of all experts, without its coefficient"]], false],
    ["Learning rate", "How far a step may move the weights.", [["train", "learning_rate", "learning rate"]], false],
    ["Gradient norm", "How hard a step pulls at the weights; a jump is a warning.", [["train", "grad_norm", "gradient norm"]], true],
    ["Tokens per second", "Of all text, and of the part that is trained.",
      [["train", "tokens_per_second", "all"], ["train", "trained_tokens_per_second", "trained"]], false],
    ["Memory", "Of one process, on its GPU if it has one.",
      [["train", "memory_gib", "largest rank"], ["train", "memory_reserved_gib", "reserved, mean of ranks"]], false, gibText],
    ["Host memory", "Of one process, outside its GPU.", [["train", "host_memory_gib", "mean of ranks"]], false, gibText],
    ["GPU use, %", "Share of the time in which the GPU had work.", [["train", "gpu_percent", "mean of ranks"]], false],
    ["GPU power, W", "Falls when the GPU waits.", [["train", "gpu_power_w", "mean of ranks"]], false],
    ["Waiting for data", "Share of the time; more than a few percent slow the run down.", [["train", "data_wait", "all ranks"]], false, percentText],
    ["Evaluation accuracy", "Share of the tokens that were predicted right.", [["eval", "eval_token_accuracy", "of tokens"]], false],
    ["Peak speed used (MFU)", "Useful arithmetic, of all that the GPUs can do.", [["train", "mfu", "MFU"]], false],
  ].map(([name, hint, lines, logs, write]) => ({ name, lines, logs, chart: new Chart(grid, name, { group, hint, write }) }));
  // What the loss of a run says, which depends on what it trains for.
  const lossHint = ({ train }) => (train.reward ? "What a step lowers; of the answers, the reward says more."
    : train.reward_accuracy ? "How far the model is from telling the better answers; lower is better."
      : "How far the predictions are from the data; lower is better.");
  let data = null, shownAxis = null;

  // The metrics of an objective in a file of the user's, which no list here knows.
  function addOwn() {
    for (const own of (data.own || []).filter((name) => !CHARTS.some((chart) => chart.own === name))) {
      const lines = [["train", own, "train"], ["eval", `eval_${own}`, "evaluation"]];
      const hint = "A metric of this run's own objective.";
      CHARTS.push({ own, name: `Own metric: ${own}`, lines, logs: false, chart: new Chart(grid, own, { group, hint }) });
    }
  }

  // The metrics of each source of a mix of data.
  function addSources() {
    const sources = data.sources || [];
    for (const [name, kind, prefix, hint] of [
      ["Loss by source", "train", "loss/", "Of the tokens of each source of the mix in a step."],
      ["Evaluation loss by source", "eval", "eval_loss/", "On the rows of each source that are held out."],
      ["Tokens by source", "train", "tokens/", "Trained so far of each source of the mix."],
    ]) {
      const lines = sources.map((source) => [kind, prefix + source, source]);
      const known = CHARTS.find((chart) => chart.prefix === prefix);
      if (known) known.lines = lines;
      else if (sources.length) CHARTS.push({ prefix, name, lines, logs: prefix !== "tokens/", chart: new Chart(grid, name, { group, hint }) });
    }
  }

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
    addOwn();
    addSources();
    if (shownAxis !== options.axis && group.zoom) group.zoomTo(null);  // a range of steps is none of tokens
    shownAxis = options.axis;
    const marks = data.attempts.slice(1).map(([attempt, step]) => ({ x: toAxis(step), label: `attempt ${attempt + 1}` }));
    const saved = (data.checkpoints || []).map((step) => ({ x: toAxis(step), label: "" }));
    const known = [...(data.train[options.axis] ?? []), ...(data.eval[options.axis] ?? [])].filter((x) => x != null);
    const extent = known.length ? [Math.min(...known), Math.max(...known)] : null;
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
      if (name === "Loss") chart.explain(lossHint(data));
      chart.show(series, { axis: options.axis, log: options.log && logs, extent, marks: name === "Loss" ? [...marks, ...saved] : marks });
    }
    const first = CHARTS.find(({ chart }) => !chart.box.hidden);
    for (const each of CHARTS) each.chart.lead(each === first);
  }

  const refresh = poll(root, async () => {
    const answer = await server.curves({ run: id, since: data?.token });
    if (answer.error) { status.textContent = answer.error; return; }
    if (!answer.same) data = merged(data, answer);
    status.textContent = !answer.rows ? "Charts appear with the first step that is logged." : answer.more ? `Reading the metrics: ${answer.rows} rows so far` : "";
    status.hidden = !status.textContent;
    root.querySelector(".ts-tools").hidden = !answer.rows;
    if (!answer.same) draw(read());
    if (answer.more) setTimeout(refresh, 50);
  }, 2);
};
