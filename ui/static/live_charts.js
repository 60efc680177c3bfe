// Curves drawn with uPlot: kept by step and only added to, joined on one axis, smoothed here.
Object.assign(Live, (() => {
  const { make, durationText, numberText } = Live;

  // What a run's answers add up to: whole at first, later only the points from `cut` on.
  function merged(kept, answer) {
    if (answer.full || !kept) return answer;
    const part = (old, fresh) => {
      const upTo = old.step.findIndex((step) => step >= answer.cut);
      const stay = upTo < 0 ? old.step.length : upTo;
      const made = {};
      const column = (before, after, count) => [
        ...(before || Array(old.step.length).fill(null)).slice(0, stay), ...(after || Array(count).fill(null))];
      for (const name of new Set([...Object.keys(old), ...Object.keys(fresh)])) {
        if (Array.isArray(old[name] || fresh[name])) made[name] = column(old[name], fresh[name], fresh.step.length);
        else {
          made[name] = {};
          for (const kind of Object.keys(old[name] || fresh[name]))
            made[name][kind] = column(old[name]?.[kind], fresh[name]?.[kind], fresh.step.length);
        }
      }
      return made;
    };
    return { ...answer, replaced: kept.replaced, train: part(kept.train, answer.train), eval: part(kept.eval, answer.eval) };
  }

  // Exponential moving average, corrected for its start; `weight` 0 leaves the values alone.
  function smoothed(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // What is set and not measured is drawn as it is.
  const EXACT = ["learning_rate"];
  const isSmoothed = (key, kind, how) => how.smooth > 0 && kind !== "eval" && !EXACT.includes(key);

  const COLOURS = { light: ["#0f766e", "#b45309", "#6d28d9", "#be123c", "#1d4ed8", "#4d7c0f", "#a21caf", "#475569"],
    dark: ["#5eead4", "#fbbf24", "#c4b5fd", "#fda4af", "#93c5fd", "#bef264", "#f0abfc", "#cbd5e1"] };
  const isDark = () => document.body.classList.contains("dark");
  const faint = (colour, share) => `${colour}${Math.round(share * 255).toString(16).padStart(2, "0")}`;
  const alone = (line) => line.y.filter((value) => value != null).length === 1;  // a line of one point is invisible
  const AXIS = { step: ["step", numberText], tokens: ["tokens", numberText], elapsed_s: ["time trained", durationText] };

  /* One chart. `show` takes lines: {label, x, y, low, high, colour (index), faint, dots, axis}; and marks: [{x, label}]. */
  class Chart {
    constructor(parent, name, height = 190) {
      this.name = name;
      this.height = height;
      this.box = make("figure", { class: "ts-chart" }, make("figcaption", {}, name));
      this.place = make("div", { class: "ts-plot" });
      this.box.append(this.place);
      parent.append(this.box);
      this.key = "";
      new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height })).observe(this.place);
    }

    show(lines, { axis = "step", log = false, marks = [] } = {}) {
      this.marks = marks;
      const used = lines.filter((line) => line.y.some((value) => value != null));
      this.box.hidden = !used.length;
      if (!used.length) return;
      const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
      const tables = used.map((line) => {
        const kept = line.x.map((x, index) => [x, index]).filter(([x]) => x != null);
        const column = (values) => positive(kept.map(([, index]) => values[index]));
        const sides = line.low ? [column(line.low), column(line.high)] : [];
        return [kept.map(([x]) => x), column(line.y), ...sides];
      });
      const data = uPlot.join(tables);
      const key = JSON.stringify([axis, log, isDark(), used.map((line) => [line.label, !!line.low, line.colour, line.faint, alone(line)])]);
      if (key === this.key) this.plot.setData(data);
      else this.draw(used, data, axis, log, key);
      this.describe(used[0]);
    }

    describe(line) {
      const known = line.y.filter((value) => value != null);
      const words = `${this.name}: ${line.label} from ${numberText(known[0])} to ${numberText(known.at(-1))}`;
      const wrap = this.plot.root.querySelector(".u-wrap");
      wrap.setAttribute("role", "img");
      wrap.setAttribute("aria-label", words);
    }

    draw(used, data, axis, log, key) {
      this.plot?.destroy();
      this.key = key;
      const palette = COLOURS[isDark() ? "dark" : "light"];
      const css = getComputedStyle(this.place);
      const text = css.getPropertyValue("--ts-muted").trim(), grid = css.getPropertyValue("--ts-line").trim();
      const series = [{ label: AXIS[axis][0], value: (_, value) => (value == null ? "-" : AXIS[axis][1](value)) }];
      const bands = [];
      for (const line of used) {
        const colour = palette[line.colour % palette.length];
        const base = { spanGaps: true, value: (_, value) => numberText(value) };
        series.push({ ...base, label: line.label, stroke: line.faint ? faint(colour, 0.4) : colour, width: line.faint ? 1 : 1.8,
          points: { show: !!line.dots || alone(line), size: 5, fill: colour }, class: line.hidden ? "ts-quiet" : undefined });
        if (line.low) {
          bands.push({ series: [series.length + 1, series.length], fill: faint(colour, 0.16) });
          for (const side of ["low", "high"])
            series.push({ ...base, label: side, class: "ts-quiet", width: 0, points: { show: false } });
        }
      }
      const ticks = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
      this.plot = new uPlot({
        width: this.place.clientWidth || 300, height: this.height, series, bands,
        scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
        axes: [{ ...ticks, values: (_, all) => all.map((value) => (value == null ? "" : AXIS[axis][1](value))), space: 70, size: 32 },
          { ...ticks, values: (_, all) => all.map((value) => (value == null ? "" : numberText(value))), size: 58 }],
        legend: { live: true }, cursor: { y: false, drag: { x: true, y: false } },
        hooks: { draw: [(plot) => this.drawMarks(plot, text)] },
      }, data, this.place);
    }

    drawMarks(plot, colour) {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.setLineDash([4, 4]);
      ctx.textAlign = "left";
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      for (const { x, label } of this.marks) {
        const at = plot.valToPos(x, "x", true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
        ctx.fillText(label, at + 4, bbox.top + 12 * devicePixelRatio);
      }
      ctx.restore();
    }
  }

  // The buttons above the charts; `changed` is called with what they say.
  function chartTools(parent, names, changed) {
    const kept = JSON.parse(sessionStorage.getItem("ts-charts") || "{}");
    const smooth = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: kept.smooth ?? 0 });
    const log = make("input", { type: "checkbox" });
    log.checked = !!kept.log;
    const axis = make("select", {}, ...Object.entries(AXIS).map(([key, [words]]) => make("option", { value: key }, words)));
    axis.value = kept.axis in AXIS ? kept.axis : "step";
    const metric = names && make("select", {}, ...Object.entries(names).map(([key, words]) => make("option", { value: key }, words)));
    const read = () => ({ smooth: +smooth.value, log: log.checked, axis: axis.value, metric: metric?.value });
    const note = () => {
      sessionStorage.setItem("ts-charts", JSON.stringify(read()));
      changed(read());
    };
    for (const one of [smooth, log, axis, metric]) one?.addEventListener("input", note);
    new MutationObserver(() => changed(read())).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    parent.append(make("div", { class: "ts-tools" },
      metric && make("label", {}, "Metric ", metric), make("label", {}, "Along ", axis), make("label", {}, "Smoothing ", smooth),
      make("label", {}, log, " Log scale")));
    return read;
  }

  return { merged, smoothed, isSmoothed, Chart, chartTools };
})());
