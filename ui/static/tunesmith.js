// Sets the title of the browser tab to the page, or to the run on a run's page. Gradio sets one title for all pages.
(() => {
  const names = { data: "Data", runs: "Runs", run: "Run", compare: "Compare", chat: "Chat", system: "System" };
  const page = location.pathname.replace(/\/+$/, "").split("/").pop();
  const run = page === "run" && (new URLSearchParams(location.search).get("run") || "");
  // `document.title` collapses whitespace; a title that never equals it would be set again forever.
  const runName = run && run.replace(/[\s\x00-\x1f]+/g, " ").trim();
  const title = `${runName || names[page] || "Train"} · Tunesmith`;
  const update = () => { if (document.title !== title) document.title = title; };
  new MutationObserver(update).observe(document.head, { childList: true, characterData: true, subtree: true });
  update();
})();
