// What the keyboard needs beyond Gradio: Tab leaves an open list behind closed, Escape closes a panel, and the focus of a
// control that disappears goes to what follows it.
(() => {
  addEventListener("keydown", (event) => {
    if (event.key !== "Tab" || !event.target.matches?.('[role="combobox"]')) return;
    event.stopPropagation();  // Gradio would open the list again after the focus has left
    // A list that scrolls takes the focus, and would be gone with it.
    document.getElementById(event.target.getAttribute("aria-controls"))?.setAttribute("tabindex", "-1");
  }, true);

  document.addEventListener("keydown", (event) => {
    const panel = event.key === "Escape" && [...document.querySelectorAll('[id^="panel-"]')].find((each) => each.checkVisibility());
    if (!panel || event.defaultPrevented) return;
    event.preventDefault();
    [...panel.querySelectorAll("button")].at(-1).click();  // Cancel
    document.getElementById(panel.id.replace("panel-", "run-"))?.focus();
  });

  // What has the focus, and what it is in; empty once the reader has clicked elsewhere.
  let path = [];
  addEventListener("pointerdown", () => { path = []; }, true);
  addEventListener("focusin", ({ target }) => {
    path = [];
    for (let each = target; each && each !== document.body; each = each.parentElement) path.push(each);
  });

  const CONTROLS = "a[href], button:not(:disabled), input:not(:disabled), select:not(:disabled), textarea:not(:disabled), summary";
  const isSeen = (each) => each.checkVisibility({ visibilityProperty: true });
  setInterval(() => {
    if (!path.length || document.activeElement !== document.body || (path[0].isConnected && isSeen(path[0]))) return;
    const near = path.find((each) => each.isConnected);
    path = [];
    // In what is left around it, or after that: a run's button for its next state, or what a panel asked for.
    const AFTER = Node.DOCUMENT_POSITION_FOLLOWING;
    const next = near && [...document.querySelectorAll(CONTROLS)].find(
      (each) => isSeen(each) && each.tabIndex >= 0 && near.compareDocumentPosition(each) & AFTER);
    next?.focus();
  }, 250);
})();
