// The Train page: names options beside their labels, marks fields with mistakes and jumps to them, joins the cards of
// strategies to their field, takes dropped files, and copies and saves texts.
(() => {
  const field = (name) => document.getElementById(`opt-${name}`);
  const LABEL = '[data-testid="block-info"], .checkbox-container .label-text';

  // The option's name, small, beside the label in words.
  const nameOptions = () => {
    for (const box of document.querySelectorAll(".ts-field:not([data-option])")) {
      const label = box.querySelector(LABEL);
      if (!label) continue;
      const name = box.id.slice("opt-".length);
      box.dataset.option = name === "gpus" && box.querySelector("input[type=text], textarea") ? "num_processes" : name;
      const code = document.createElement("code");
      code.className = "ts-option";
      code.append(...box.dataset.option.split(/(?<=_)/).flatMap((part) => [part, document.createElement("wbr")]).slice(0, -1));
      label.append(" ", code);
    }
  };

  // Cards: the text field of the strategy holds the choice; its radio buttons follow it, and set it.
  const strategy = () => field("strategy")?.querySelector("input, textarea");
  let focused = "";

  const showChoice = () => {
    const cards = document.getElementById("strategy-cards");
    if (!cards || !strategy()) return;
    const chosen = strategy().value.trim() || cards.dataset.default;
    for (const radio of cards.querySelectorAll("input")) {
      if (radio.checked !== (radio.value === chosen)) radio.checked = radio.value === chosen;
      if (radio.checked && radio.closest("details")) radio.closest("details").open = true;
      // Cards that were drawn anew have lost the focus.
      if (radio.value === focused && document.activeElement === document.body) radio.focus({ preventScroll: true });
    }
  };

  const setText = (input, text) => {
    input.value = text;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  };

  document.addEventListener("change", (event) => {
    if (event.target.matches?.("#strategy-cards input") && strategy()) setText(strategy(), event.target.value);
  });
  document.addEventListener("input", (event) => { if (event.target === strategy()) showChoice(); });
  document.addEventListener("focusin", (event) => {
    focused = event.target.matches?.("#strategy-cards input") ? event.target.value : "";
  });

  // Files dropped on the zone go to the upload of Gradio.
  const zone = (event) => event.target.closest?.("#upload-data");
  for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, (event) => {
    const target = zone(event);
    target?.classList.toggle("ts-over", kind === "dragover");
    if (!target || kind === "dragleave") return;
    event.preventDefault();
    const input = target.parentElement.querySelector("input[type=file]");
    if (kind !== "drop" || !input || !event.dataTransfer.files.length) return;
    input.files = event.dataTransfer.files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  });

  const mark = () => {
    const preview = document.querySelector("[data-errors]");
    if (!preview) return;
    const errors = JSON.parse(preview.dataset.errors || "{}");
    for (const fieldBox of document.querySelectorAll(".ts-field")) {
      const lines = errors[fieldBox.id.slice("opt-".length)] || [];
      const old = fieldBox.querySelector(".ts-field-error");
      if ((old ? old.textContent : "") === lines.join("\n")) continue;
      if (old) old.remove();
      fieldBox.classList.toggle("ts-wrong", lines.length > 0);
      const inputs = fieldBox.querySelectorAll("input, textarea");
      for (const input of inputs) {
        input.toggleAttribute("aria-invalid", lines.length > 0);
        if (lines.length) {
          input.setAttribute("aria-invalid", "true");
          input.setAttribute("aria-describedby", `${fieldBox.id}-error`);
        } else input.removeAttribute("aria-describedby");
      }
      if (!lines.length) continue;
      const message = document.createElement("p");
      message.className = "ts-field-error";
      message.id = `${fieldBox.id}-error`;
      message.textContent = lines.join("\n");
      fieldBox.append(message);
    }
  };

  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 30)));

  const unfold = async (accordion) => {
    const head = accordion?.querySelector(":scope > button.label-wrap");
    if (head && !head.classList.contains("open")) { head.click(); await frame(); }
  };

  const show = async (name, section) => {
    if (!field(name)?.offsetParent) {  // in a closed accordion, which may not be rendered yet
      const all = document.getElementById("all-options");
      await unfold(all);
      const heads = [...(all?.querySelectorAll("button.label-wrap") || [])];
      await unfold(heads.find((head) => head.textContent.includes(section) && head.parentElement !== all)?.parentElement);
    }
    for (let tries = 0; tries < 20 && !field(name); tries++) await frame();
    const card = name === "strategy" && document.querySelector("#strategy-cards input:checked");
    const target = card && card.offsetParent ? card : field(name)?.querySelector("input, textarea");
    (target || field(name))?.scrollIntoView({ block: "center" });
    target?.focus();
  };

  const copy = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");  // over plain HTTP from another machine there is no clipboard API
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };

  const save = (text, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/yaml" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest ? event.target.closest("button") : null;
    if (!button) return;
    if (button.dataset.preset !== undefined) {
      const picked = document.querySelector("#picked-preset :is(input, textarea)");
      if (picked) setText(picked, button.dataset.preset);
    }
    if (button.dataset.field !== undefined) await show(button.dataset.field, button.dataset.section);
    const text = button.closest(".ts-box")?.querySelector("pre")?.textContent;
    if (button.dataset.copy !== undefined && text !== undefined) {
      await copy(text);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    }
    if (button.dataset.save !== undefined && text !== undefined) save(text, button.dataset.save);
  });

  let scheduled = false;
  const schedule = () => {
    nameOptions();  // at once: a frame later, what lies below would move
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => { scheduled = false; mark(); showChoice(); });
  };
  if (document.body) new MutationObserver(schedule).observe(document.body, { childList: true, subtree: true });
  else addEventListener("DOMContentLoaded", () => new MutationObserver(schedule).observe(document.body, { childList: true, subtree: true }));
})();
