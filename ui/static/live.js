// Shared by the live parts: elements from plain text, polling that pauses while the page is hidden, formatted values.
const Live = (() => {
  function make(tag, attributes, ...children) {
    const svg = ["svg", "polyline", "circle", "title"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child != null));
    return node;
  }

  function poll(element, refresh, seconds) {
    let busy = false;
    const tick = async () => {
      if (!element.isConnected) return clearInterval(timer);
      if (busy || document.hidden) return;
      busy = true;
      try {
        await refresh();
      } catch (error) {
        console.warn("no answer; retrying", error);
      } finally {
        busy = false;
        element.classList.remove("ts-wait");
      }
    };
    const timer = setInterval(tick, seconds * 1000);
    document.addEventListener("visibilitychange", tick);
    tick();
    return tick;
  }

  // Parts of a page that show the values of one step do so together: `show` is called with the step under the pointer of
  // another part, or null. Returns the function that tells the others.
  const parts = new Set();
  function follow(show) {
    parts.add(show);
    return (step) => parts.forEach((other) => { if (other !== show) other(step); });
  }

  function durationText(seconds) {
    if (seconds == null || !isFinite(seconds)) return "-";
    const rounded = Math.max(0, Math.round(seconds));
    const pad = (number) => String(number).padStart(2, "0");
    if (rounded < 60) return `${rounded} s`;
    if (rounded < 3600) return `${Math.floor(rounded / 60)} min ${pad(rounded % 60)} s`;
    if (rounded < 86400) return `${Math.floor(rounded / 3600)} h ${pad(Math.floor((rounded % 3600) / 60))} min`;
    return `${Math.floor(rounded / 86400)} d ${pad(Math.floor((rounded % 86400) / 3600))} h`;
  }

  function timeText(iso) {
    const time = new Date(iso);
    if (!iso || isNaN(time)) return "-";
    const pad = (number) => String(number).padStart(2, "0");
    const day = `${time.getFullYear()}-${pad(time.getMonth() + 1)}-${pad(time.getDate())}`;
    return `${day} ${pad(time.getHours())}:${pad(time.getMinutes())}`;
  }

  // An exponent of two digits, as in the config, the log and commands: 2e-05.
  const exponentText = (value) => value.toExponential(3).replace(/\.?0*e/, "e").replace(/(?<=e[-+])(?=\d$)/, "0");

  function numberText(value) {
    if (value == null || !isFinite(value)) return "-";
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
    if (size && size < 1e-4) return exponentText(value);
    return String(+value.toPrecision(4));
  }

  // As `byte_text` writes a size; with `finer` more decimals.
  function byteText(size, finer = 0) {
    if (size == null || !isFinite(size)) return "-";
    let unit = 0;
    for (; Math.abs(size) >= 1000 && unit < 4; unit++) size /= 1024;
    return `${size.toFixed((unit && Math.abs(size) < 100 ? 1 : 0) + (unit && finer))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  }
  const gibText = (gib, finer = 0) => byteText(gib == null ? null : gib * 2 ** 30, finer);

  const percentText = (share, finer = 0) => (share == null || !isFinite(share) ? "-" : `${numberText(+(100 * share).toFixed(2 + finer))} %`);

  // Numbers that stand side by side: as many decimals as the finest of them needs.
  function alignedTexts(values) {
    const texts = values.map(numberText), decimals = Math.max(...texts.map((text) => (/^-?\d+\.\d+$/.test(text) ? text.split(".")[1].length : 0)));
    return texts.map((text, index) => (/^-?\d+(\.\d+)?$/.test(text) ? values[index].toFixed(decimals) : text));
  }

  const badge = (state) => make("span", { class: `ts-badge ts-${/^[a-z]+$/.test(state) ? state : "unknown"}` }, state);
  const runPage = (id) => `run?${new URLSearchParams({ run: id })}`;

  return { make, poll, follow, durationText, timeText, numberText, exponentText, byteText, gibText, percentText, alignedTexts, badge, runPage };
})();
