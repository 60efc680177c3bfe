// The theme: what this browser chose (localStorage), else what the system asks for. Runs before the first paint.
const Theme = (() => {
  const KEY = "tunesmith-theme", root = document.documentElement;
  const NAMES = { system: "System theme", light: "Light", dark: "Dark", contrast: "High contrast" };
  const isDarkSystem = matchMedia("(prefers-color-scheme: dark)"), isContrastSystem = matchMedia("(prefers-contrast: more)");

  let unstored = null;  // where storage is blocked, a choice holds for this page
  const chosen = () => {
    let name = unstored;
    try { name ??= localStorage.getItem(KEY); } catch { /* blocked */ }
    return name in NAMES ? name : "system";
  };

  // Classes of Gradio's body: it sets or removes `dark` by the system alone, once it has loaded.
  const dress = () => {
    const [dark, contrast] = [root.dataset.theme.endsWith("dark"), root.dataset.theme.startsWith("contrast")];
    const { classList } = document.body;
    if (classList.contains("dark") !== dark) classList.toggle("dark", dark);
    if (classList.contains("ts-contrast") !== contrast) classList.toggle("ts-contrast", contrast);
  };

  const apply = () => {
    const name = chosen(), scheme = isDarkSystem.matches ? "dark" : "light";
    const contrast = scheme === "dark" ? "contrast-dark" : "contrast";
    root.dataset.theme = name === "contrast" || (name === "system" && isContrastSystem.matches) ? contrast : name === "system" ? scheme : name;
    if (document.body) dress();
    const control = document.getElementById("ts-theme");
    if (control) control.value = name;
  };

  const watchBody = () => {
    dress();
    new MutationObserver(dress).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  };
  new MutationObserver((_, observer) => {
    if (document.body) { observer.disconnect(); watchBody(); }
  }).observe(root, { childList: true });
  for (const query of [isDarkSystem, isContrastSystem]) query.addEventListener("change", apply);
  addEventListener("storage", (event) => { if (event.key === KEY) apply(); });  // chosen in another tab
  apply();

  // Fills the control in the header, and follows it.
  const bind = (element) => {
    const control = element.querySelector("#ts-theme");
    control.replaceChildren(...Object.entries(NAMES).map(([value, label]) => new Option(label, value)));
    control.value = chosen();
    control.addEventListener("change", () => {
      try { localStorage.setItem(KEY, control.value); } catch { unstored = control.value; }
      apply();
    });
    element.querySelector(".ts-skip").addEventListener("click", (event) => {
      event.preventDefault();  // <base> would make it an address of another page
      document.getElementById("content").focus();
    });
  };
  return { bind };
})();
