// Tells how a watched run ended: a card on every open page, a mark in the title of hidden tabs, and a notification of
// the system where the reader has allowed them. The tabs of a browser share what is watched and what has ended through
// localStorage, one key per run, so that each end is told once; nothing is asked for while nothing is watched.
const Notices = (() => {
  const { make, badge, runPage } = Live;
  const WATCHED = "tunesmith-watched ", ENDED = "tunesmith-ended ", ASKED = "tunesmith-asked";
  const SECONDS = 5, SEEN_MS = 1000, MOST_RUNS = 100;  // the server answers for no more at a time; the others follow
  const SENTENCES = { done: "is done", stopped: "was stopped", failed: "failed" }, SIGNS = { done: "✓", stopped: "■", failed: "✕" };

  const storage = (() => {
    try { return window.localStorage; } catch { return null; }  // blocked: nothing is watched
  })();
  const runs = (prefix) => Object.keys(storage || {}).filter((key) => key.startsWith(prefix)).map((key) => key.slice(prefix.length));
  const isWatched = (id) => storage?.getItem(WATCHED + id) != null;

  function store(key, value) {
    try { storage?.setItem(key, value); } catch { /* full: not watched */ }
  }

  // The ends that nobody has dismissed: id, state, cause, and whether a visible page has shown it.
  function ends() {
    return runs(ENDED).flatMap((id) => {
      try {
        const { state, cause, seen } = JSON.parse(storage.getItem(ENDED + id));
        return [{ id, state: String(state), cause: String(cause), seen }];
      } catch {
        storage.removeItem(ENDED + id);  // not ours: another server may have used this address
        return [];
      }
    });
  }

  const sentence = ({ id, state }) => `${id} ${SENTENCES[state] || "ended"}`;
  const cards = new Map();
  let list = null, server = null, seenTimer = null;

  function dismiss(id) {
    const hadFocus = cards.get(id)?.box.contains(document.activeElement);
    storage.removeItem(ENDED + id);
    update();
    if (hadFocus) (list.querySelector("button") || document.getElementById("content")).focus({ preventScroll: true });
  }

  function card(end) {
    const close = make("button", { type: "button", "aria-label": `Dismiss: ${sentence(end)}`, title: "Dismiss (Esc)", onclick: () => dismiss(end.id) }, "×");
    return make("div", { class: "ts-notice", "data-run": end.id },
      make("div", {}, make("p", {}, badge(end.state), " ", make("a", { href: runPage(end.id) }, end.id)), end.cause ? make("p", {}, end.cause) : null), close);
  }

  // Shows what storage holds; called whenever that or the visibility of the page changes.
  function update() {
    if (!list) return;
    const all = ends(), unseen = all.filter((end) => !end.seen);
    for (const [id, { box }] of cards) if (!all.some((end) => end.id === id)) { box.remove(); cards.delete(id); }
    for (const end of unseen) {
      const text = JSON.stringify([end.state, end.cause]), old = cards.get(end.id);
      if (old?.text === text) continue;
      const box = card(end);
      if (old) old.box.replaceWith(box);
      else list.append(box);
      cards.set(end.id, { box, text });
    }
    const [first] = unseen;
    PageTitle.mark(!document.hidden || !first ? "" : unseen.length > 1 ? `${unseen.length} runs ended` : `${SIGNS[first.state] || ""} ${first.id}`);
    clearTimeout(seenTimer);
    if (document.hidden || !first) return;
    seenTimer = setTimeout(() => {
      for (const { id, state, cause } of unseen) if (storage.getItem(ENDED + id) != null) store(ENDED + id, JSON.stringify({ state, cause, seen: true }));
      update();
    }, SEEN_MS);
  }

  function tellSystem(end) {
    if (window.Notification?.permission !== "granted") return;
    try {
      const notification = new Notification(sentence(end), { body: end.cause, tag: end.id });
      notification.onclick = () => { window.focus(); notification.close(); };
    } catch { /* browsers of phones offer none to a page; the card is there */ }
  }

  // One tab asks for all: none while another has asked within the last seconds.
  async function ask() {
    const ids = runs(WATCHED).slice(0, MOST_RUNS);
    if (!ids.length || Math.abs(Date.now() - storage.getItem(ASKED)) < 900 * SECONDS) return;
    store(ASKED, Date.now());
    const answer = await server.run_ends({ runs: ids.join("\n") }).catch(() => null);  // null too from a server that ends
    for (const end of answer?.ended || []) {
      if (!isWatched(end.id)) continue;
      storage.removeItem(WATCHED + end.id);
      if (!end.state) continue;  // deleted
      store(ENDED + end.id, JSON.stringify({ state: end.state, cause: end.cause, seen: false }));
      tellSystem(end);
    }
    update();
  }

  // On every page, once: `element` is its header.
  function bind(element, functions) {
    [list, server] = [element.querySelector(".ts-notices"), functions];
    addEventListener("storage", update);
    document.addEventListener("visibilitychange", update);
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || event.target.matches?.("input, select, textarea")) return;
      const box = event.target.closest?.(".ts-notice") || list.lastElementChild;
      if (box) dismiss(box.dataset.run);
    });
    update();
    // The first requests of a page are those that it waits for.
    if (document.documentElement.dataset.shown === undefined) addEventListener("ts-shown", ask, { once: true });
    else ask();
    setInterval(ask, 1000 * SECONDS);
  }

  function watch(id, on = true) {
    if (on) store(WATCHED + id, "");
    else storage?.removeItem(WATCHED + id);
    dispatchEvent(new Event("ts-watched"));
  }

  // On the page of a run: whether it is watched, and a button to be told outside the browser too.
  function control(element) {
    const id = new URLSearchParams(location.search).get("run") || "";
    const box = make("input", { type: "checkbox", onchange: () => watch(id, box.checked) });
    const allow = make("button", { type: "button", class: "ts-button", onclick: async () => {
      await Notification.requestPermission();
      draw();
    } }, "Also outside the browser");
    const note = make("span", { class: "ts-note", role: "status" });
    element.querySelector(".ts-watch").append(make("label", {}, box, " Tell me when it ends"), allow, note);
    const draw = () => {
      const permission = isSecureContext ? window.Notification?.permission : undefined;
      box.checked = isWatched(id);
      allow.hidden = !box.checked || permission !== "default";
      note.textContent = !box.checked ? "" : permission === "granted" ? "here and by a notification of your system"
        : permission === "denied" ? "on every page of Tunesmith; this browser blocks notifications" : "";
    };
    for (const event of ["storage", "ts-watched"]) addEventListener(event, draw);
    draw();
  }

  return { bind, control, watch };
})();
