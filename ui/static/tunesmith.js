// Sets the title of the browser tab to the page, or to the run on a run's page, or to a mark for something else. Gradio
// sets one title for all pages.
const PageTitle = (() => {
  const names = { data: "Data", runs: "Runs", run: "Run", compare: "Compare", evaluate: "Evaluate", chat: "Chat", system: "System" };
  const page = location.pathname.replace(/\/+$/, "").split("/").pop();
  const run = page === "run" && (new URLSearchParams(location.search).get("run") || "");
  // `document.title` collapses whitespace; a title that never equals it would be set again forever.
  const collapsed = (text) => text.replace(/[\s\x00-\x1f]+/g, " ").trim();
  const own = (run && collapsed(run)) || names[page] || "Train";
  let title = "";
  const update = () => { if (document.title !== title) document.title = title; };
  const mark = (text) => {
    title = `${collapsed(text) || own} · Tunesmith`;
    update();
  };
  new MutationObserver(update).observe(document.head, { childList: true, characterData: true, subtree: true });
  mark("");
  return { mark };
})();

// Shows a page once it is whole: its first requests are answered, no part of it waits (`ts-wait`), and its height has
// stood for a moment; at the latest after some seconds. tunesmith.css hides what is below the title until then.
(() => {
  const CHECK_MS = 25, STEADY_CHECKS = 3, LATEST_MS = 5000;
  const plainFetch = window.fetch;
  let underWay = 0, asked = false, steady = 0, height = -1, began = null;
  const isCounted = (request) => /\/(run|component_server)\b/.test(String(request?.url ?? request));
  window.fetch = async (...parts) => {
    const counted = isCounted(parts[0]) ? 1 : 0;
    asked ||= counted === 1;
    underWay += counted;
    try { return await plainFetch(...parts); } finally { underWay -= counted; }
  };
  const timer = setInterval(() => {
    const content = document.querySelector("main > .column");
    if (window.gradio_config?.auth_required) began = -LATEST_MS;  // the login form
    else if (!content || document.readyState !== "complete") return;
    began ??= performance.now();
    const waits = underWay || !asked || !document.querySelector("h1") || document.querySelector(".ts-wait");
    steady = waits || content?.scrollHeight !== height ? 0 : steady + 1;
    height = content?.scrollHeight;
    if (steady < STEADY_CHECKS && performance.now() - began < LATEST_MS) return;
    clearInterval(timer);
    window.fetch = plainFetch;
    document.documentElement.dataset.shown = "";
    performance.mark("ts-shown");
    dispatchEvent(new Event("ts-shown"));
  }, CHECK_MS);
})();
