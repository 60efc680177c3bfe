// What the keyboard needs beyond Gradio: Tab leaves an open list behind closed, and Escape closes a panel.
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
})();
