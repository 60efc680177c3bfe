// The Chat page: the buttons inside a conversation, its scrolling, and what the browser does with the text.
const Chat = (() => {
  const copy = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");  // over plain HTTP from another machine there is no clipboard API
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  const copied = async (button, text) => {
    const label = button.textContent;
    try {
      await copy(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copying is not allowed here";
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  };

  // Replaces the text of a message with a field; what is sent again drops what followed.
  const edit = (button, send) => {
    const turn = button.closest(".ts-turn"), text = turn.querySelector(".ts-own"), tools = turn.querySelector(".ts-tools");
    if (turn.querySelector("textarea")) return turn.querySelector("textarea").focus();
    const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
    const area = make("textarea", { value: text.textContent, rows: Math.min(12, text.textContent.split("\n").length + 1) });
    area.setAttribute("aria-label", button.getAttribute("aria-label"));
    const later = Number(button.dataset.later);
    const label = later ? `Send again, dropping ${later} later ${later === 1 ? "message" : "messages"}` : "Send again";
    const again = make("button", { type: "button", className: "ts-button", textContent: label });
    const cancel = make("button", { type: "button", className: "ts-button", textContent: "Cancel" });
    const field = make("div", { className: "ts-edit" }), buttons = make("div", { className: "ts-tools" });
    buttons.append(again, cancel);
    field.append(area, buttons);
    const end = () => {
      field.remove();
      text.hidden = tools.hidden = false;
      button.focus();
    };
    cancel.onclick = end;
    again.onclick = () => {
      if (!area.value.trim()) return area.focus();
      end();
      send({ act: "edit", index: Number(button.dataset.index), text: area.value });
    };
    area.onkeydown = (event) => {
      if (event.key === "Escape") end();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      again.click();
    };
    text.hidden = tools.hidden = true;
    turn.append(field);
    area.focus();
  };

  const act = (button, send) => {
    const index = Number(button.dataset.index), turn = button.closest(".ts-turn");
    switch (button.dataset.act) {
      case "copy-code": return copied(button, button.closest(".ts-code").querySelector("code").textContent);
      case "copy": return copied(button, turn.querySelector(".ts-raw").textContent);
      case "edit": return edit(button, send);
      case "regenerate": return send({ act: "regenerate" });
      case "results": {
        const fields = [...turn.querySelectorAll("textarea[data-result]")], empty = fields.find((field) => !field.value.trim());
        if (empty) return empty.focus();
        return send({ act: "results", index, results: fields.map((field) => field.value) });
      }
    }
  };

  // Follows the end of a conversation, unless its reader has scrolled up.
  const follow = (element) => {
    let follows = true;
    const log = () => element.querySelector(".ts-log");
    element.addEventListener("scroll", ({ target }) => {
      if (target === log()) follows = target.scrollTop + target.clientHeight >= target.scrollHeight - 40;
    }, true);
    new MutationObserver(() => { if (follows && log()) log().scrollTop = log().scrollHeight; })
      .observe(element, { childList: true, subtree: true, characterData: true });
  };

  const bind = (element, send) => {
    element.addEventListener("click", ({ target }) => {
      const button = target.closest?.("button[data-act]");
      if (button && element.contains(button)) act(button, send);
    });
    follow(element);
  };

  const save = (rows) => {
    if (!rows) return;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([rows], { type: "application/jsonl" }));
    link.download = "chat.jsonl";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  return {
    bind, save,
    showRaw: (on) => { document.getElementById("chat-panes").classList.toggle("ts-raw-on", on); },
    isSure: (...conversations) => conversations.every((text) => !text || text === "[]") || confirm("Clear both conversations? They cannot be restored."),
  };
})();
