// Charts drawn with uPlot: merges updates of curves, aligns them on a common x axis, and smooths them.
Object.assign(Live, (() => {
  const { make, durationText, numberText, exponentText } = Live;

  // Merges an answer into the stored curves: all points at first, later only those from step `cut` on.
  function merged(stored, answer) {
    if (answer.full || !stored) return answer;
    const mergePart = (old, fresh) => {
      const upTo = old.step.findIndex((step) => step >= answer.cut);
      const keptLength = upTo < 0 ? old.step.length : upTo;
      const columns = {};
      const column = (before, after, count) => [
        ...(before || Array(old.step.length).fill(null)).slice(0, keptLength), ...(after || Array(count).fill(null))];
      for (const name of new Set([...Object.keys(old), ...Object.keys(fresh)])) {
        if (Array.isArray(old[name] || fresh[name])) columns[name] = column(old[name], fresh[name], fresh.step.length);
        else {
          columns[name] = {};
          for (const kind of Object.keys(old[name] || fresh[name]))
            columns[name][kind] = column(old[name]?.[kind], fresh[name]?.[kind], fresh.step.length);
        }
      }
      return columns;
    };
    return { ...answer, replaced: stored.replaced, train: mergePart(stored.train, answer.train), eval: mergePart(stored.eval, answer.eval) };
  }

  // Exponential moving average with bias correction; `weight` 0 leaves the values unchanged.
  function smoothed(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // Values that are set rather than measured are never smoothed.
  const EXACT = ["learning_rate"];
  const isSmoothed = (key, kind, options) => options.smooth > 0 && kind !== "eval" && !EXACT.includes(key);

  const theme = () => document.documentElement.dataset.theme;  // its colours are in tokens.css
  const CURVES = 8;
  const NAME_GAP = 12, NAME_SHARE = 0.36;  // pixels between plot and names; most of a chart's width that names may take
  const faint = (colour, share) => `${colour}${Math.round(share * 255).toString(16).padStart(2, "0")}`;
  const isSinglePoint = (line) => line.y.filter((value) => value != null).length === 1;  // needs a marker: a line through one point is invisible
  const AXIS = { step: ["step", numberText], tokens: ["tokens", numberText], elapsed_s: ["time trained", durationText] };
  const WHOLE_NUMBERS = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
  const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, ...WHOLE_NUMBERS.map((days) => 86400 * days)];
  // Numbers in one notation: all with an exponent where the smallest needs one; sizes and shares as fine as tells them apart.
  function tickTexts(values, write) {
    const known = values.filter((value) => value != null);
    const finer = [0, 1, 2].find((more) => new Set(known.map((value) => write?.(value, more))).size === known.length) ?? 2;
    if (write) return values.map((value) => (value == null ? "" : write(value, finer)));
    const isSmall = values.some((value) => value && Math.abs(value) < 1e-4);
    return values.map((value) => (value == null ? "" : isSmall && value ? exponentText(value) : numberText(value)));
  }
  // Pixels of the y axis: its longest text, and what charts of short ones all have, so that these begin below each other.
  function axisWidth(plot, texts) {
    plot.ctx.save();
    plot.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    const longest = Math.max(0, ...(texts ?? []).map((text) => plot.ctx.measureText(text).width / devicePixelRatio));
    plot.ctx.restore();
    return Math.max(58, Math.ceil(longest) + 20);
  }
  // A curve that is 0 throughout stands at the foot of 0 to 1; uPlot would go to 100, which no share can reach.
  const valueRange = (_, low, high) => (low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true));
  // What the legend says: the value under the pointer, else the last one.
  const reading = (write) => (plot, value, series, index) =>
    write(index == null ? plot.data?.[series]?.findLast((other) => other != null) : value);

  /* Charts that share a cursor and a zoom. `changed` is called with the range of x, or null for all of it; `pointed` with
     the x under the pointer, or null once it has left. */
  class ChartGroup {
    constructor(changed, pointed) {
      this.charts = [];
      this.zoom = null;
      this.changed = changed;
      this.pointed = pointed;
    }

    // Shows the values at x in every chart, as the pointer would; null ends that.
    pointTo(x) {
      for (const chart of this.charts) chart.pointTo(x);
    }

    zoomTo(range) {
      this.zoom = range;
      for (const chart of this.charts) chart.applyZoom();
      this.changed(range);
    }
  }

  /* One chart. `show` takes lines, each {label, x, y, low, high, colour (index), faint, dots}, and marks, each {x, label};
     a mark without a label is a tick on the x axis. The x axis spans `extent`, by default that of the lines. */
  class Chart {
    constructor(parent, name, { height = 190, hint = "", write = null, group = new ChartGroup(() => {}, () => {}) } = {}) {
      this.ownHeight = height;
      this.write = write;  // how a value is written; by default as a plain number
      this.name = name;
      this.group = group;
      group.charts.push(this);
      this.box = make("figure", { class: "ts-chart" }, make("figcaption", {}, name), hint && make("p", { class: "ts-note" }, hint));
      this.plotArea = make("div", { class: "ts-plot" });
      this.box.append(this.plotArea);
      parent.append(this.box);
      this.key = "";
      new ResizeObserver(() => this.fit()).observe(this.plotArea);
    }

    // The chart that leads is as large as the styles make it (.ts-chart-lead); the others have a height of their own.
    get height() {
      return parseInt(getComputedStyle(this.box).getPropertyValue("--ts-lead-height")) || this.ownHeight;
    }

    fit() {
      const { height } = this, width = this.plotArea.clientWidth;
      if (this.plot && (this.plot.height !== height || this.plot.width !== width)) this.plot.setSize({ width, height });
    }

    explain(hint) {
      this.box.querySelector(".ts-note").textContent = hint;
    }

    lead(on) {
      this.box.classList.toggle("ts-chart-lead", on);
      this.fit();
    }

    show(lines, { axis = "step", log = false, marks = [], extent = null } = {}) {
      this.marks = marks;
      const used = lines.filter((line) => line.y.some((value) => value != null));
      this.box.hidden = !used.length;
      if (!used.length) return;
      const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
      const tables = used.map((line) => {
        const stored = line.x.map((x, index) => [x, index]).filter(([x]) => x != null);
        const column = (values) => positive(stored.map(([, index]) => values[index]));
        const sides = line.low ? [column(line.low), column(line.high)] : [];
        return [stored.map(([x]) => x), column(line.y), ...sides];
      });
      const data = uPlot.join(tables), [first, last] = extent ?? [data[0][0], data[0].at(-1)];
      this.extent = first < last ? [first, last] : [first - 1, last + 1];
      const key = JSON.stringify([axis, log, theme(), used.map((line) => [line.label, !!line.low, line.colour, line.faint, isSinglePoint(line)])]);
      this.unit = AXIS[axis];
      this.line = used[0];
      if (key === this.key) this.plot.setData(data, !this.group.zoom);
      else this.draw(used, data, axis, log, key);
      if (this.group.zoom) this.applyZoom();
      else this.describe();
    }

    // Shows the range that the group is zoomed to; new data alone would leave the y axis as it was.
    applyZoom() {
      if (!this.plot || this.box.hidden) return;
      if (this.group.zoom) this.plot.setScale("x", { min: this.group.zoom[0], max: this.group.zoom[1] });
      else this.plot.setData(this.plot.data);
      this.describe();
    }

    pointTo(x) {
      if (!this.plot || this.box.hidden) return;
      const left = x == null ? -1 : this.plot.valToPos(x, "x");
      const inside = left >= 0 && left <= this.plot.over.clientWidth;
      this.plot.setCursor(inside ? { left, top: 0 } : { left: -10, top: -10 });
    }

    describe() {
      const known = this.line.y.filter((value) => value != null), [unit, text] = this.unit, write = this.write ?? numberText;
      const range = this.group.zoom ? `, zoomed to ${unit} ${this.group.zoom.map(text).join(" to ")}` : "";
      const label = `${this.name}: ${this.line.label} from ${write(known[0])} to ${write(known.at(-1))}${range}`;
      const wrap = this.plot.root.querySelector(".u-wrap");
      wrap.setAttribute("role", "img");
      wrap.setAttribute("aria-label", label);
    }

    draw(used, data, axis, log, key) {
      this.plot?.destroy();
      this.key = key;
      const css = getComputedStyle(this.plotArea);
      const palette = Array.from({ length: CURVES }, (_, index) => css.getPropertyValue(`--ts-curve-${index + 1}`).trim());
      const text = css.getPropertyValue("--ts-muted").trim(), grid = css.getPropertyValue("--ts-grid").trim();
      const series = [{ label: AXIS[axis][0], value: (_, value, __, index) => (index == null ? "last" : AXIS[axis][1](value)) }];
      const bands = [];
      for (const line of used) {
        const colour = palette[line.colour % palette.length];
        const base = { spanGaps: true, value: reading(this.write ?? numberText) };
        series.push({ ...base, label: line.label, stroke: line.faint ? faint(colour, 0.4) : colour, width: line.faint ? 1 : 1.8,
          points: { show: !!line.dots || isSinglePoint(line), size: 5, fill: colour }, class: line.hidden ? "ts-quiet" : undefined });
        if (line.low) {
          bands.push({ series: [series.length + 1, series.length], fill: faint(colour, 0.16) });
          for (const side of ["low", "high"])
            series.push({ ...base, label: side, class: "ts-quiet", width: 0, points: { show: false } });
        }
      }
      const ticks = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
      this.plot = new uPlot({
        width: this.plotArea.clientWidth || 300, height: this.height, series, bands,
        padding: [() => (this.marks.some(({ label }) => label) ? 22 : 12), (plot) => this.nameSpace(plot, used) || 25, null, null],
        scales: { x: { time: false, range: (_, low, high) => (this.group.zoom ? [low, high] : this.extent) }, y: { distr: log ? 3 : 1, range: log ? undefined : valueRange } },
        axes: [{ ...ticks, values: (_, all) => all.map((value) => (value == null ? "" : AXIS[axis][1](value))), space: 70, size: 32,
          incrs: axis === "elapsed_s" ? SECONDS : WHOLE_NUMBERS },
          { ...ticks, values: (_, all) => tickTexts(all, this.write), size: axisWidth }],
        legend: { live: true }, cursor: this.cursor(),
        hooks: { draw: [(plot) => this.drawMarks(plot, text), (plot) => this.drawNames(plot, used)], setSelect: [(plot) => this.zoomToSelection(plot)] },
      }, data, this.plotArea);
      this.plot.over.addEventListener("mousemove", (event) => this.group.pointed(this.plot.posToVal(event.offsetX, "x")));
      this.plot.over.addEventListener("mouseleave", () => this.group.pointed(null));
    }

    // The cursor is shown at the same x in all charts of the group; a drag zooms, a double click shows everything.
    cursor() {
      const pub = (type) => type === "mousemove" || type === "mouseleave";
      const grouped = this.group.charts.length > 1 ? { sync: { key: "ts-group", scales: ["x", null], filters: { pub } } } : {};
      return { y: false, drag: { x: true, y: false, setScale: false }, ...grouped,
        bind: { dblclick: () => () => this.group.zoomTo(null) } };
    }

    zoomToSelection(plot) {
      const { left, width } = plot.select;
      if (width < 4) return;
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      this.group.zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    }

    // Curves that are named beside the plot, where there are several: the legend is then only for their values.
    named(used) {
      const names = used.filter((line) => !line.faint);
      return names.length > 1 && names.length <= CURVES ? names : [];
    }

    // Pixels to the right of the plot for the names, so that they cover no curve and no mark; 0 where they would take too much of it.
    nameSpace(plot, used) {
      plot.ctx.save();
      plot.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      const widths = this.named(used).map((line) => plot.ctx.measureText(line.name ?? line.label).width / devicePixelRatio);
      plot.ctx.restore();
      const space = Math.ceil(Math.max(0, ...widths)) + NAME_GAP + 2;
      return widths.length && space <= plot.width * NAME_SHARE ? space : 0;
    }

    // Writes each name level with the last visible point of its curve, or as near as the others let it, with a thin line to it.
    drawNames(plot, used) {
      if (!this.nameSpace(plot, used)) return;
      const { ctx, bbox } = plot, height = 14 * devicePixelRatio, gap = NAME_GAP * devicePixelRatio;
      const { min: low, max: high } = plot.scales.x, edge = bbox.left + bbox.width;
      const ends = this.named(used).flatMap((line) => {
        const series = plot.series.find((each) => each.label === line.label), values = plot.data[plot.series.indexOf(series)];
        const last = values.findLastIndex((value, index) => value != null && plot.data[0][index] >= low && plot.data[0][index] <= high);
        if (last < 0) return [];
        const y = Math.min(Math.max(plot.valToPos(values[last], "y", true), bbox.top), bbox.top + bbox.height);
        return [{ text: line.name ?? line.label, colour: series.stroke(plot), x: plot.valToPos(plot.data[0][last], "x", true), y, row: y }];
      }).sort((one, other) => one.y - other.y);
      ends.forEach((end, index) => { end.row = Math.max(end.y, index ? ends[index - 1].row + height : bbox.top); });
      let limit = bbox.top + bbox.height;
      for (const end of ends.toReversed()) {
        end.row = Math.min(end.row, limit);
        limit = end.row - height;
      }
      ctx.save();
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "left";
      ctx.textBaseline = "middle";
      ctx.lineWidth = devicePixelRatio;
      for (const { text, colour, x, y, row } of ends) {
        ctx.strokeStyle = ctx.fillStyle = colour;
        ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(Math.min(x, edge), y);
        ctx.lineTo(edge, y);
        ctx.lineTo(edge + gap - 2 * devicePixelRatio, row);
        ctx.stroke();
        ctx.fillText(text, edge + gap, row);
      }
      ctx.restore();
    }

    drawMarks(plot, colour) {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.textAlign = "left";
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      for (const { x, label } of this.marks) {
        const at = plot.valToPos(x, "x", true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.setLineDash(label ? [4, 4] : []);
        ctx.beginPath();
        if (!label) {
          ctx.moveTo(at, bbox.top + bbox.height - 7 * devicePixelRatio);
          ctx.lineTo(at, bbox.top + bbox.height);
          ctx.stroke();
          continue;
        }
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
        const right = bbox.left + bbox.width - ctx.measureText(label).width;
        ctx.fillText(label, Math.min(at, right), bbox.top - 6 * devicePixelRatio);  // above the plot, where no curve is
      }
      ctx.restore();
    }
  }

  // The controls above the charts; calls `changed` with their values.
  function chartTools(parent, names, changed) {
    const stored = JSON.parse(sessionStorage.getItem("ts-charts") || "{}");
    const smooth = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: stored.smooth ?? 0 });
    const log = make("input", { type: "checkbox" });
    log.checked = !!stored.log;
    const axis = make("select", {}, ...Object.entries(AXIS).map(([key, [label]]) => make("option", { value: key }, label)));
    axis.value = stored.axis in AXIS ? stored.axis : "step";
    const metric = names && make("select", {}, ...Object.entries(names).map(([key, label]) => make("option", { value: key }, label)));
    const read = () => ({ smooth: +smooth.value, log: log.checked, axis: axis.value, metric: metric?.value });
    const note = () => {
      sessionStorage.setItem("ts-charts", JSON.stringify(read()));
      changed(read());
    };
    for (const input of [smooth, log, axis, metric]) input?.addEventListener("input", note);
    new MutationObserver(() => changed(read())).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    parent.append(make("div", { class: "ts-tools" },
      metric && make("label", {}, "Metric ", metric), make("label", {}, "X axis ", axis), make("label", {}, "Smoothing ", smooth),
      make("label", {}, log, " Log scale")));
    return read;
  }

  return { merged, smoothed, isSmoothed, Chart, ChartGroup, chartTools };
})());
