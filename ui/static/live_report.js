// Saves the report of an evaluation as a file.
Live.report = (element, server) => {
  const { make } = Live;
  const root = element.querySelector(".ts-report");
  const id = new URLSearchParams(location.search).get("eval") || "";
  const status = make("p", { class: "ts-note", role: "status", hidden: true });
  const button = make("button", { type: "button", class: "ts-button", onclick: save }, "Download report.json");
  root.append(button, status);
  root.classList.remove("ts-wait");

  async function save() {
    const answer = await server.report({ eval: id }).catch(() => ({ error: "no answer from the server; try again" }));
    status.hidden = !answer.error;
    status.textContent = answer.error || "";
    if (answer.error) return;
    const link = make("a", { href: URL.createObjectURL(new Blob([answer.text], { type: "application/json" })), download: `${id}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
};
