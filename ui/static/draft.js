// The form's draft: what was filled in on Train and Data, kept for this tab while one moves about, goes back or reloads.
(() => {
  const query = () => new URLSearchParams(location.search);
  // A run that goes on has a draft of its own: its settings are not those of the next run.
  const key = () => {
    const run = query().get("resume");
    return run === null ? "tunesmith-draft" : `tunesmith-draft-of-${run}`;
  };
  let ready = false;  // until the page is filled, its fields say nothing of what a person wants

  const stored = () => {
    try { return JSON.parse(sessionStorage.getItem(key()) || "null"); } catch { return null; }
  };

  const store = (draft) => {
    try { sessionStorage.setItem(key(), JSON.stringify(draft)); } catch { /* no room: the form goes on without */ }
  };

  window.tunesmithDraft = {
    // What the page is to be filled with. A link that says what to show wins, until the page is reloaded or gone back to.
    read() {
      const draft = stored();
      const [entry] = performance.getEntriesByType("navigation");
      const again = entry && entry.type !== "navigate" && draft && draft.source === location.search;
      return draft && (location.search === "" || again) ? JSON.stringify(draft) : "";
    },

    ready() { ready = true; },

    // `choices`: preset, strategy and devices, as far as the page has them; `names` and `values`: its options.
    keep(choices, names, values, left_out = {}) {
      if (!ready) return;
      const before = stored() || {};
      const options = { ...before.options };
      names.forEach((name, index) => {
        if (values[index] === left_out[name]) delete options[name];
        else options[name] = values[index];
      });
      store({ ...before, ...choices, options, source: location.search });
    },

    replace(text) { if (text) store({ ...JSON.parse(text), source: "" }); },

    all() { return JSON.stringify(stored() || ""); },

    clear() { ready = false; sessionStorage.removeItem(key()); },
  };
})();
