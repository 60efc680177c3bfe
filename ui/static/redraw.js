// Gradio draws a part of a page anew when its content changes. What was open there stays open, and the focus stays.
(() => {
  const CONTROLS = "a[href], button, input, select, textarea, summary, [tabindex]";
  const nameOf = (fold) => fold.dataset.fold || fold.querySelector("summary")?.textContent;
  const labelOf = (control) =>
    [control.tagName, control.id, control.getAttribute("href"), control.getAttribute("aria-label") || control.textContent].join("\n");
  const opened = new Set();
  let focused = null;

  document.addEventListener("toggle", ({ target }) => {
    if (target.matches?.("details") && target.isConnected) opened[target.open ? "add" : "delete"](nameOf(target));
  }, true);
  document.addEventListener("focusin", ({ target }) => {
    focused = { control: target, label: labelOf(target), part: target.closest(".html-container") };
  });
  document.addEventListener("pointerdown", () => { focused = null; });

  const restore = () => {
    if (opened.size)
      for (const fold of document.querySelectorAll("details:not([open])")) if (opened.has(nameOf(fold))) fold.open = true;
    const active = document.activeElement;
    if (!focused?.part?.isConnected || (active !== document.body && active !== focused.control)) return;
    const { control, label, part } = focused;
    if (active === control && labelOf(control) === label) return;
    // It may have been moved, as a row of a table, or been made into the link of another row.
    const again = [...part.querySelectorAll(CONTROLS)].find((each) => labelOf(each) === label);
    (again || (control.isConnected ? control : null))?.focus({ preventScroll: true });
  };
  addEventListener("DOMContentLoaded", () => new MutationObserver(restore).observe(document.body, { childList: true, subtree: true }));
})();
