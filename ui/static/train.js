// The Train page: marks fields with mistakes, jumps to them, and copies and saves texts.
(() => {
  const field = (name) => document.getElementById(`opt-${name}`);

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
    field(name)?.scrollIntoView({ block: "center" });
    field(name)?.querySelector("input, textarea")?.focus();
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
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => { scheduled = false; mark(); });
  };
  if (document.body) new MutationObserver(schedule).observe(document.body, { childList: true, subtree: true });
  else addEventListener("DOMContentLoaded", () => new MutationObserver(schedule).observe(document.body, { childList: true, subtree: true }));
})();
