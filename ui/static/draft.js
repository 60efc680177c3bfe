// The draft of the form on Train and Data, kept for this tab across navigation and reloads.
(() => {
  const query = () => new URLSearchParams(location.search);
  // Resuming a run uses a separate draft: its settings are not those of a new run.
  const key = () => {
    const run = query().get("resume");
    return run === null ? "tunesmith-draft" : `tunesmith-draft-of-${run}`;
  };
  let ready = false;  // until the page is filled, its values are not the user's

  const stored = () => {
    try { return JSON.parse(sessionStorage.getItem(key()) || "null"); } catch { return null; }
  };

  const store = (draft) => {
    try { sessionStorage.setItem(key(), JSON.stringify(draft)); } catch { /* storage is full: work without a draft */ }
  };

  window.tunesmithDraft = {
    // The draft to fill the form with. A link with a query takes precedence, unless the page is reloaded or revisited.
    read() {
      const draft = stored();
      const [entry] = performance.getEntriesByType("navigation");
      const reloaded = entry && entry.type !== "navigate" && draft && draft.source === location.search;
      return draft && (location.search === "" || reloaded) ? JSON.stringify(draft) : "";
    },

    ready() { ready = true; },

    // `choices`: preset, strategy, devices and job, if the page has them; `names` and `values`: its options; `ignored`: values
    // by option that are not the user's and are not kept.
    keep(choices, names, values, ignored = {}) {
      if (!ready) return;
      const before = stored() || {};
      const options = { ...before.options };
      names.forEach((name, index) => {
        if (values[index] === ignored[name]) delete options[name];
        else options[name] = values[index];
      });
      store({ ...before, ...choices, options, source: location.search });
    },

    replace(text) { if (text) store({ ...JSON.parse(text), source: "" }); },

    all() { return JSON.stringify(stored() || ""); },

    clear() { ready = false; sessionStorage.removeItem(key()); },
  };
})();
