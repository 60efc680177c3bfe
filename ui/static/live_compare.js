// One metric of several runs on one axis.
Live.compare = (element, server) => {
  const { make, poll, merged, smoothed, isSmoothed, Chart, chartTools } = Live;
  const box = element.querySelector(".ts-charts");
  const METRICS = { loss: "loss", eval_loss: "evaluation loss", learning_rate: "learning rate", grad_norm: "gradient norm",
    tokens_per_second: "tokens per second", memory_gib: "memory, GiB", eval_token_accuracy: "evaluation accuracy", mfu: "MFU" };
  const ids = [...new Set((new URLSearchParams(location.search).get("runs") || "").split(",").filter(Boolean))].slice(0, 8);
  const read = chartTools(box, METRICS, draw);
  const said = make("p", { class: "ts-note", role: "status" });
  box.append(said);
  const chart = new Chart(box, "Curves", 380);
  const kept = new Map();

  function draw(how) {
    const lines = [];
    ids.forEach((id, colour) => {
      const run = kept.get(id), kind = how.metric.startsWith("eval_") ? "eval" : "train";
      const values = run && run[kind][how.metric];
      if (!values) return;
      const x = run[kind][how.axis], dots = kind === "eval", smooth = isSmoothed(how.metric, kind, how);
      if (smooth) lines.push({ label: `${id}, as logged`, x, y: values.mean, colour, faint: true });
      lines.push({ label: id, x, y: smooth ? smoothed(values.mean, how.smooth) : values.mean, colour, dots });
    });
    chart.name = METRICS[how.metric];
    chart.box.querySelector("figcaption").textContent = chart.name;
    said.textContent = !ids.length ? "Choose two or more runs above." : lines.length ? "" : "None of these runs has logged that metric.";
    said.hidden = !said.textContent;
    chart.show(lines, { axis: how.axis, log: how.log });
  }

  const look = poll(box, async () => {
    let more = false, changed = !kept.size;
    for (const id of ids) {
      const before = kept.get(id);
      const answer = await server.curves({ run: id, since: before?.token });
      if (answer.error) continue;
      if (!answer.same) kept.set(id, merged(before, answer));
      changed ||= !answer.same;
      more ||= answer.more;
    }
    if (changed) draw(read());
    if (more) setTimeout(look, 50);
  }, 3);
};
