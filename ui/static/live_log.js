// The log: a window of the file that grows at both ends. Lines are set as plain text.
Live.log = (element, server) => {
  const { make, poll } = Live;
  const box = element.querySelector(".ts-logs");
  const id = new URLSearchParams(location.search).get("run") || "";
  const MOST = 4000;
  const win = { start: 0, end: -1, size: 0, mark: null };

  const who = make("select", { onchange: begin }, make("option", { value: "" }, "all"), make("option", { value: "launcher" }, "launcher"));
  const words = make("input", { type: "search", placeholder: "text", onkeydown: (event) => { if (event.key === "Enter") find(words.value, event.shiftKey); } });
  const follow = make("input", { type: "checkbox", onchange: () => { if (follow.checked) begin(); } });
  const only = make("input", { type: "checkbox", onchange: () => lines.classList.toggle("ts-only", only.checked) });
  follow.checked = true;
  const said = make("span", { class: "ts-note", role: "status" });
  const lines = make("div", { class: "ts-lines", role: "log", "aria-live": "off", "aria-label": "Log", tabindex: 0 });
  const button = (text, onclick) => make("button", { type: "button", class: "ts-button", onclick }, text);
  const older = button("Load older lines", () => loadOlder());
  const newer = button("Load newer lines", () => loadNewer(true));
  box.append(
    make("div", { class: "ts-tools" },
      make("label", {}, "Written by ", who), make("label", {}, "Find ", words),
      button("Previous", () => find(words.value, true)), button("Next", () => find(words.value, false)),
      button("Previous error", () => find("", true)), button("Next error", () => find("", false)),
      make("label", {}, only, " Errors only"), make("label", {}, follow, " Follow the end"), said),
    older, lines, newer);

  function drawn([at, time, from, text, error]) {
    const by = from === "" ? "" : from === "launcher" || from === "supervisor" ? from : `rank ${from}`;
    return make("div", { class: `ts-line${error ? " ts-wrong" : ""}`, "data-at": at },
      make("span", { class: "ts-when" }, time.slice(11)), make("span", { class: "ts-by" }, by), make("span", { class: "ts-text" }, text));
  }

  const piece = (more) => server.log_lines({ run: id, who: who.value, ...more });
  const atEnd = () => lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;

  function bound() {
    win.size = Math.max(win.size, win.end);
    older.hidden = win.start <= 0;
    newer.hidden = follow.checked || win.end >= win.size;
  }

  function trim(first) {
    while (lines.childElementCount > MOST) {
      (first ? lines.firstElementChild : lines.lastElementChild).remove();
      if (first) win.start = +lines.firstElementChild.dataset.at;
      else win.end = +lines.lastElementChild.dataset.at;
    }
  }

  function take(answer) {
    if (answer.error) { said.textContent = answer.error; return false; }
    win.size = answer.size;
    return true;
  }

  async function begin() {
    win.end = -1;
    win.mark = null;
    follow.checked = true;
    await loadNewer(false);
  }

  let reading = false;
  async function loadNewer(byHand) {
    if (reading) return;
    reading = true;
    try {
      const answer = await piece({ after: win.end, follow: follow.checked });
      if (!take(answer)) return;
      if (answer.jumped) {
        lines.replaceChildren();
        win.start = answer.start;
      }
      lines.append(...answer.lines.map(drawn));
      win.end = answer.end;
      trim(follow.checked || byHand);
      if (follow.checked) lines.scrollTop = lines.scrollHeight;
      bound();
    } finally {
      reading = false;
    }
  }

  async function loadOlder() {
    const answer = await piece({ before: win.start });
    if (!take(answer)) return;
    const height = lines.scrollHeight;
    follow.checked = false;
    lines.prepend(...answer.lines.map(drawn));
    win.start = answer.start;
    lines.scrollTop += lines.scrollHeight - height;
    trim(false);
    bound();
  }

  async function find(text, back) {
    follow.checked = false;
    let start = win.mark != null ? win.mark + (back ? 0 : 1) : back ? win.end : win.start;
    for (;;) {
      const found = await server.log_find({ run: id, who: who.value, words: text, start, back });
      if (found.error) { said.textContent = found.error; return; }
      if (found.at != null) return go(found.at, text);
      if (!found.more) break;
      start = found.searched;
      said.textContent = `looked through to byte ${start.toLocaleString("en")}`;
    }
    said.textContent = `no ${back ? "earlier" : "later"} ${text ? "line with that text" : "error"}`;
  }

  async function go(at, text) {
    win.mark = at;
    said.textContent = "";
    let line = lines.querySelector(`[data-at="${at}"]`);
    if (!line) {
      const [ahead, on] = [await piece({ before: at }), await piece({ after: at })];
      if (!take(ahead) || !take(on)) return;
      lines.replaceChildren(...ahead.lines.slice(-200).map(drawn), ...on.lines.map(drawn));
      win.start = ahead.lines.length > 200 ? ahead.lines.at(-200)[0] : ahead.start;
      win.end = on.end;
      line = lines.querySelector(`[data-at="${at}"]`);
    }
    lines.querySelector(".ts-found")?.classList.remove("ts-found");
    if (line) {
      line.classList.add("ts-found");
      lines.scrollTop = line.offsetTop - lines.offsetTop - lines.clientHeight / 3;
    }
    bound();
  }

  lines.addEventListener("wheel", () => setTimeout(() => { if (!atEnd()) follow.checked = false; bound(); }, 50), { passive: true });

  poll(box, async () => {
    if (who.childElementCount === 2) {
      const ranks = (await server.log_writers({ run: id })).ranks || [];
      who.append(...ranks.map((rank) => make("option", { value: rank }, `rank ${rank}`)));
    }
    if (follow.checked || win.end < 0) await loadNewer(false);
    else {
      const answer = await piece({ before: 0 });
      if (take(answer)) bound();
    }
  }, 1);
};
