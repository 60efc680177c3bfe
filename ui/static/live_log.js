// The log: shows a part of the file that can be extended at both ends. Lines are inserted as plain text.
Live.log = (element, server) => {
  const { make, poll } = Live;
  const root = element.querySelector(".ts-logs");
  const id = new URLSearchParams(location.search).get("run") || "";
  const MOST = 4000;
  const range = { start: 0, end: -1, size: 0, mark: null };

  const writer = make("select", { onchange: begin }, make("option", { value: "" }, "all"), make("option", { value: "launcher" }, "launcher"), make("option", { value: "supervisor" }, "supervisor"));
  const search = make("input", { type: "search", placeholder: "text", onkeydown: (event) => { if (event.key === "Enter") find(search.value, event.shiftKey); } });
  const follow = make("input", { type: "checkbox", onchange: () => { if (follow.checked) begin(); } });
  const onlyErrors = make("input", { type: "checkbox", onchange: () => lines.classList.toggle("ts-only", onlyErrors.checked) });
  follow.checked = true;
  const status = make("span", { class: "ts-note", role: "status" });
  const lines = make("div", { class: "ts-lines", role: "log", "aria-live": "off", "aria-label": "Log", tabindex: 0 });
  const button = (text, onclick) => make("button", { type: "button", class: "ts-button", onclick }, text);
  const older = button("Load older lines", () => loadOlder());
  const newer = button("Load newer lines", () => loadNewer(true));
  root.append(
    make("div", { class: "ts-tools" },
      make("label", {}, "Written by ", writer), make("label", {}, "Find ", search),
      button("Previous", () => find(search.value, true)), button("Next", () => find(search.value, false)),
      button("Previous error", () => find("", true)), button("Next error", () => find("", false)),
      make("label", {}, onlyErrors, " Errors only"), make("label", {}, follow, " Follow the end"), status),
    older, lines, newer);

  function drawLine([at, time, from, text, error]) {
    const by = from === "" ? "" : from === "launcher" || from === "supervisor" ? from : `rank ${from}`;
    return make("div", { class: `ts-line${error ? " ts-wrong" : ""}`, "data-at": at },
      make("span", { class: "ts-when" }, time.slice(11)), make("span", { class: "ts-by" }, by), make("span", { class: "ts-text" }, text));
  }

  const read = (more) => server.log_lines({ run: id, who: writer.value, ...more });
  const atEnd = () => lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;

  function updateButtons() {
    range.size = Math.max(range.size, range.end);
    older.hidden = range.start <= 0;
    newer.hidden = follow.checked || range.end >= range.size;
  }

  function trim(first) {
    while (lines.childElementCount > MOST) {
      const line = first ? lines.firstElementChild : lines.lastElementChild;
      line.remove();
      if (first) range.start = +lines.firstElementChild.dataset.at;
      else range.end = +line.dataset.at;
    }
  }

  function accept(answer) {
    if (answer.error) { status.textContent = answer.error; return false; }
    range.size = answer.size;
    return true;
  }

  async function begin() {
    range.end = -1;
    range.mark = null;
    follow.checked = true;
    await loadNewer(false);
  }

  let reading = false;
  async function loadNewer(byHand) {
    if (reading) return;
    reading = true;
    try {
      const answer = await read({ after: range.end, follow: follow.checked });
      if (!accept(answer)) return;
      if (answer.jumped) {
        lines.replaceChildren();
        range.start = answer.start;
      }
      lines.append(...answer.lines.map(drawLine));
      range.end = answer.end;
      trim(follow.checked || byHand);
      if (follow.checked) lines.scrollTop = lines.scrollHeight;
      updateButtons();
    } finally {
      reading = false;
    }
  }

  async function loadOlder() {
    const answer = await read({ before: range.start });
    if (!accept(answer)) return;
    const height = lines.scrollHeight;
    follow.checked = false;
    lines.prepend(...answer.lines.map(drawLine));
    range.start = answer.start;
    lines.scrollTop += lines.scrollHeight - height;
    trim(false);
    updateButtons();
  }

  async function find(text, back) {
    follow.checked = false;
    let start = range.mark != null ? range.mark + (back ? 0 : 1) : back ? range.end : range.start;
    for (;;) {
      const match = await server.log_find({ run: id, who: writer.value, words: text, start, back });
      if (match.error) { status.textContent = match.error; return; }
      if (match.at != null) return go(match.at, text);
      if (!match.more) break;
      start = match.searched;
      status.textContent = `Searched to byte ${start.toLocaleString("en")}`;
    }
    status.textContent = `No ${back ? "earlier" : "later"} ${text ? "line with that text" : "error"}`;
  }

  async function go(at, text) {
    range.mark = at;
    status.textContent = "";
    let line = lines.querySelector(`[data-at="${at}"]`);
    if (!line) {
      const [ahead, on] = [await read({ before: at }), await read({ after: at })];
      if (!accept(ahead) || !accept(on)) return;
      lines.replaceChildren(...ahead.lines.slice(-200).map(drawLine), ...on.lines.map(drawLine));
      range.start = ahead.lines.length > 200 ? ahead.lines.at(-200)[0] : ahead.start;
      range.end = on.end;
      line = lines.querySelector(`[data-at="${at}"]`);
    }
    lines.querySelector(".ts-found")?.classList.remove("ts-found");
    if (line) {
      line.classList.add("ts-found");
      lines.scrollTop = line.offsetTop - lines.offsetTop - lines.clientHeight / 3;
    }
    updateButtons();
  }

  lines.addEventListener("wheel", () => setTimeout(() => { if (!atEnd()) follow.checked = false; updateButtons(); }, 50), { passive: true });

  poll(root, async () => {
    if (writer.childElementCount === 3) {
      const ranks = (await server.log_writers({ run: id })).ranks || [];
      writer.append(...ranks.map((rank) => make("option", { value: rank }, `rank ${rank}`)));
    }
    if (follow.checked || range.end < 0) await loadNewer(false);
    else {
      const answer = await read({ before: 0 });
      if (accept(answer)) updateButtons();
    }
  }, 1);
};
