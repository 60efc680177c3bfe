// The answers of a run to the same prompts at several steps, with what changed from one step to the next.
Live.fixed_prompts = (element, server) => {
  const { make, poll, numberText } = Live;
  const root = element.querySelector(".ts-fixed-prompts"), heading = root.previousElementSibling;
  const id = new URLSearchParams(location.search).get("run") || "";
  const choice = make("select", { onchange: () => choose() });
  const status = make("p", { class: "ts-note", role: "status" });
  const prompt = make("div", { class: "ts-prompt", tabindex: 0, role: "region", "aria-label": "Prompt that is answered at each step" });
  const expected = make("p", { class: "ts-note ts-expected" });
  const body = make("tbody", {});
  const head = make("tr", {}, make("th", { scope: "col", class: "ts-number" }, "Step"), make("th", { scope: "col" }, "Answer"));
  const table = make("div", { class: "ts-table", tabindex: 0, role: "region", "aria-label": "Answers by step" },
    make("table", {}, make("thead", {}, head), body));
  root.append(make("div", { class: "ts-tools" }, make("label", {}, "Prompt ", choice)), status, prompt, expected, table);
  root.hidden = heading.hidden = true;
  let number = 0, token = null, chosen = false;

  function choose() {
    [number, token, chosen] = [choice.selectedIndex, null, true];
    refresh();
  }

  function row({ step, ended, same, parts }) {
    const texts = parts.map(([text, isNew]) => (isNew ? make("mark", {}, text) : text));
    const note = same ? make("em", {}, " same as before") : null, cut = ended ? null : make("em", {}, " … cut at eval_answer_tokens");
    const answer = texts.length ? texts : [make("em", {}, "empty")];
    return make("tr", {}, make("td", { class: "ts-number" }, numberText(step)), make("td", { class: "ts-answer" }, ...answer, cut, note));
  }

  function draw(fresh) {
    if (fresh.full) {
      choice.replaceChildren(...fresh.prompts.map((name, index) => make("option", { selected: index === fresh.prompt }, `${index + 1}: ${name}`)));
      number = fresh.prompt;
      prompt.textContent = fresh.text.trim();
      expected.hidden = !fresh.expected;
      expected.replaceChildren("Answer in the data: ", make("span", { class: "ts-answer" }, fresh.expected.trim()));
      body.replaceChildren();
    }
    body.append(...fresh.listed.map(row));
    const shown = body.children.length;
    const first = shown < fresh.steps ? ` The first and the newest ${shown - 1} of ${fresh.steps} steps are listed.` : "";
    const some = fresh.older ? ` Listed are the newest (${shown}); older steps are in answers.jsonl.` : first;
    status.textContent = `Most likely answers as training goes on; what differs from the step before is marked.${some}`;
  }

  let visible = false;
  const refresh = poll(root, async () => {
    if (!visible) return;
    let fresh;
    do {  // again, if another one was chosen meanwhile
      chosen = false;
      fresh = await server.fixed_prompts({ run: id, prompt: number, since: token });
    } while (chosen);
    if (fresh.same) return;
    root.hidden = heading.hidden = !fresh.error && fresh.full && !fresh.prompts.length;
    token = fresh.token ?? null;
    if (fresh.error) status.textContent = fresh.error;
    else if (!root.hidden) draw(fresh);
  }, 4);
  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    refresh();
  }, { rootMargin: "100% 0px" }).observe(element);
};
