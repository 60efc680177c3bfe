// The title of the browser's tab: the page, and on a run's page the run. Gradio sets one title for all pages.
(() => {
  const names = { data: "Data", runs: "Runs", run: "Run", compare: "Compare", chat: "Chat", system: "System" };
  const page = location.pathname.replace(/\/+$/, "").split("/").pop();
  const run = page === "run" && (new URLSearchParams(location.search).get("run") || "");
  // `document.title` gives blanks back as one space; a title that it never equals would be set again for ever.
  const shown = run && run.replace(/[\s\x00-\x1f]+/g, " ").trim();
  const title = `${shown || names[page] || "Train"} · Tunesmith`;
  const keep = () => { if (document.title !== title) document.title = title; };
  new MutationObserver(keep).observe(document.head, { childList: true, characterData: true, subtree: true });
  keep();
})();
