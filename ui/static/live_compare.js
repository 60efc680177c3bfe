// One metric of several runs on one axis.
Live.compare = (element, server) => {
  const { make, poll, merged, smoothed, isSmoothed, Chart, chartTools } = Live;
  const root = element.querySelector(".ts-charts");
  const METRICS = { loss: "loss", eval_loss: "evaluation loss", learning_rate: "learning rate", grad_norm: "gradient norm",
    tokens_per_second: "tokens per second", memory_gib: "memory, GiB", eval_token_accuracy: "evaluation accuracy", mfu: "MFU",
    aux_loss: "load balancing loss" };
  const ids = [...new Set((new URLSearchParams(location.search).get("runs") || "").split(",").filter(Boolean))].slice(0, 8);
  const read = chartTools(root, METRICS, draw);
  const status = make("p", { class: "ts-note", role: "status" });
  root.append(status);
  const chart = new Chart(root, "Curves", { height: 380 });
  const data = new Map();

  function draw(options) {
    const lines = [];
    ids.forEach((id, colour) => {
      const run = data.get(id), kind = options.metric.startsWith("eval_") ? "eval" : "train";
      const values = run && run[kind][options.metric];
      if (!values) return;
      const x = run[kind][options.axis], dots = kind === "eval", smooth = isSmoothed(options.metric, kind, options);
      if (smooth) lines.push({ label: `${id}, as logged`, x, y: values.mean, colour, faint: true });
      lines.push({ label: id, x, y: smooth ? smoothed(values.mean, options.smooth) : values.mean, colour, dots });
    });
    chart.name = METRICS[options.metric];
    chart.box.querySelector("figcaption").textContent = chart.name;
    status.textContent = !ids.length ? "Choose two or more runs above." : lines.length ? "" : "None of these runs has logged this metric.";
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
    if (changed) draw(read());
    if (more) setTimeout(refresh, 50);
  }, 3);
};
