// The runs that wait for devices, in order: moved by drag, by buttons, or with Alt and an arrow key.
Live.queueList = (root, server, moved) => {
  const { make, runPage } = Live;
  const list = make("ol", {});
  const status = make("p", { class: "ts-note", role: "status" });
  const hint = make("p", { class: "ts-note" }, "First in line first. Drag a run, or press its arrows (Alt+↑, Alt+↓).");
  const section = make("section", { class: "ts-section ts-queue", hidden: true, "aria-label": "Queue" },
    make("h2", {}, "Queue"), hint, list, status);
  root.append(section);
  let rows = [], dragged = null, waiting = null;

  // Names the run to be in front of or behind: that stays right when others start or move meanwhile.
  async function move(row, target) {
    const answer = await server.queue_move({ run: row.id, ...target }).catch(() => ({ error: "no answer from the server; try again" }));
    status.textContent = answer.error ? `Not moved: ${answer.error}` : `${row.id} is now number ${answer.place} of ${answer.of}.`;
    moved();
  }

  function step(row, places) {
    const other = rows[rows.indexOf(row) + places];
    if (other && row.listed) move(row, { [places < 0 ? "before" : "after"]: other.run_dir });
    else status.textContent = row.listed ? `${row.id} is already ${places < 0 ? "first" : "last"}.` : `${row.id} is in another runs folder.`;
  }

  function drop() {
    const order = [...list.children], index = order.indexOf(dragged), row = dragged.row;
    const before = rows.indexOf(row);
    if (index < before) move(row, { before: order[index + 1].row.run_dir });
    if (index > before) move(row, { after: order[index - 1].row.run_dir });
  }

  function endDrag() {
    dragged?.classList.remove("ts-dragged");
    dragged = null;
    if (waiting) show(waiting);
  }

  function item(row, index) {
    const arrow = (text, places, word) => make("button", {
      type: "button", class: "ts-button", "aria-label": `move ${row.id} ${word}`, "aria-keyshortcuts": places < 0 ? "Alt+ArrowUp" : "Alt+ArrowDown",
      "aria-disabled": rows[index + places] && row.listed ? null : "true", onclick: () => step(row, places),
    }, text);
    const needs = `needs ${row.devices}${row.held_by.length ? `, in use by ${row.held_by.join(", ")}` : ""}`;
    const name = row.listed ? make("a", { href: runPage(row.id), draggable: "false" }, row.id) : make("span", { title: row.run_dir }, row.id);
    const entry = make("li", {
      draggable: String(row.listed),
      onkeydown: (event) => {
        if (!event.altKey || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
        event.preventDefault();
        step(row, event.key === "ArrowUp" ? -1 : 1);
      },
      ondragstart: (event) => {
        dragged = entry;
        event.dataTransfer.effectAllowed = "move";
        event.dataTransfer.setData("text/plain", row.id);
        entry.classList.add("ts-dragged");
      },
      ondragover: (event) => {
        if (!dragged) return;
        event.preventDefault();
        const box = entry.getBoundingClientRect();
        if (entry !== dragged) list.insertBefore(dragged, event.clientY > box.top + box.height / 2 ? entry.nextSibling : entry);
      },
      ondrop: (event) => { event.preventDefault(); if (dragged) drop(); },
      ondragend: (event) => {
        if (event.dataTransfer.dropEffect === "none") waiting ||= rows;  // let go elsewhere: as it was
        endDrag();
      },
    }, make("span", { class: "ts-grip", "aria-hidden": "true" }, row.listed ? "⠿" : ""), make("span", { class: "ts-queue-number" }, `${index + 1}.`),
    make("span", { class: "ts-queued" }, name, make("span", { class: "ts-note" }, needs)), arrow("↑", -1, "forward"), arrow("↓", 1, "back"));
    entry.row = row;
    return entry;
  }

  function show(next) {
    waiting = dragged ? next : null;
    if (dragged) return;
    rows = next;
    const label = list.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    section.hidden = !rows.length;
    hint.hidden = rows.length < 2;
    list.replaceChildren(...rows.map(item));
    if (label) [...list.querySelectorAll("button")].find((button) => button.getAttribute("aria-label") === label)?.focus();
  }

  return show;
};
