// The answers that a run has sampled to a prompt, with their rewards.
Live.answers = (element, server) => {
  const { make, poll, numberText, alignedTexts } = Live;
  const root = element.querySelector(".ts-answers"), heading = root.previousElementSibling;
  const id = new URLSearchParams(location.search).get("run") || "";
  const button = (label, onclick) => make("button", { type: "button", class: "ts-button", onclick }, label);
  const earlier = button("Earlier step", () => choose(-1, 0)), later = button("Later step", () => choose(1, 0));
  const previous = button("Previous prompt", () => choose(0, -1)), next = button("Next prompt", () => choose(0, 1));
  const status = make("p", { class: "ts-note", role: "status" });
  const prompt = make("div", { class: "ts-prompt", tabindex: 0, role: "region", "aria-label": "Prompt" });
  const expected = make("p", { class: "ts-note ts-expected" });
  const table = make("div", { class: "ts-table", tabindex: 0, role: "region", "aria-label": "Sampled answers" });
  root.append(make("div", { class: "ts-tools" }, earlier, later, previous, next), status, prompt, expected, table);
  root.hidden = heading.hidden = true;
  let step = null, number = 0, token = null, answer = null, chosen = false;

  // The newest step stays in sight while the run goes on, until another one, or another prompt, is chosen.
  function choose(bySteps, byPrompts) {
    if (!answer || document.activeElement?.getAttribute("aria-disabled") === "true") return;
    const { steps } = answer, last = steps.length - 1;
    const at = chosen && step == null ? last : Math.max(0, steps.indexOf(step ?? answer.step));
    const moved = Math.min(last, Math.max(0, at + bySteps));
    step = bySteps > 0 && moved === last ? null : steps[moved];
    number = Math.min(answer.prompts - 1, Math.max(0, number + byPrompts));
    [token, chosen] = [null, true];
    refresh();
  }

  // A button that was just used keeps the focus where there is nothing further.
  const allow = (control, possible) => control.setAttribute("aria-disabled", String(!possible));

  function draw() {
    const { steps, functions, listed } = answer, at = steps.indexOf(answer.step);
    allow(earlier, at > 0);
    allow(later, at >= 0 && at < steps.length - 1);
    allow(previous, answer.prompt > 0);
    allow(next, answer.prompt < answer.prompts - 1);
    const same = answer.equal && answer.answers > 1 ? " All got the same, so this prompt teaches nothing at this step." : "";
    const best = answer.answers > listed.length ? ` The best ${listed.length} of ${answer.answers} are listed.` : "";
    status.textContent = `Step ${answer.step}, prompt ${answer.prompt + 1} of ${answer.prompts}: mean reward ${numberText(answer.mean)}.${same}${best}`;
    prompt.textContent = answer.text.trim();
    expected.hidden = !answer.expected;
    expected.replaceChildren("Answer in the data: ", make("span", { class: "ts-answer" }, answer.expected.trim()));
    const names = ["Reward", ...functions.map((name) => name.split(":").at(-1)), "Tokens"];
    const numeric = (tag, value) => make(tag, { class: "ts-number", scope: tag === "th" && "col" }, value);
    const rewards = alignedTexts(listed.map((each) => each.reward));
    const rows = listed.map((each, index) => make("tr", {},
      ...[rewards[index], ...(functions.length ? each.rewards.map(numberText) : []), numberText(each.tokens)].map((value) => numeric("td", value)),
      make("td", { class: "ts-answer" }, each.text.trim() || make("em", {}, "empty"), each.ended ? null : make("em", {}, " … cut at max_completion_length"))));
    const head = make("tr", {}, ...names.map((name) => numeric("th", name)), make("th", { scope: "col" }, "Answer"));
    table.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  let visible = false;
  const refresh = poll(root, async () => {
    if (!visible) return;
    let fresh;
    do {  // again, if another one was chosen meanwhile
      chosen = false;
      fresh = await server.answers({ run: id, step, prompt: number, since: token });
    } while (chosen);
    if (fresh.same) return;
    root.hidden = heading.hidden = !fresh.error && fresh.step == null;
    if (fresh.error) {
      status.textContent = fresh.error;
      step = token = null;
      return;
    }
    [token, answer, number] = [fresh.token, fresh, fresh.prompt ?? 0];
    if (!root.hidden) draw();
  }, 4);
  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    refresh();
  }, { rootMargin: "100% 0px" }).observe(element);
};
