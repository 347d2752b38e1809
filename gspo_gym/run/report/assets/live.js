"use strict";
// The live page: data come from the server that sent it, and again when it says that something has changed.

class LiveSource {
  async ask(path, values = {}) {
    const response = await fetch(`${path}?${new URLSearchParams(values)}`);
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  }

  async open(place) {
    this.runs = await this.ask("runs");
    if (!this.runs.length) throw new Error("There is no run yet. This page looks again every second.");
    // Without a choice, the run that is looked at stays, although another one was updated last.
    const wanted = place.run ?? this.name;
    this.name = this.runs.some(({ name }) => name === wanted) ? wanted : this.runs[0].name;
    const beside = (place.beside ?? "").split(",").filter((name) => name && name !== this.name && this.runs.some((run) => run.name === name));
    const found = await Promise.all([this.ask("run", { run: this.name }), ...beside.map((name) => this.ask("run", { run: name, beside: 1 }))]);
    return found;
  }

  steps() {
    return page.runs[0].steps;
  }

  step(name) {
    return this.ask("step", { run: this.name, name });
  }

  group(name, number) {
    return this.ask("group", { run: this.name, name, number });
  }

  watch(onchange) {
    const events = new EventSource("changes");
    events.onmessage = ({ data }) => onchange(JSON.parse(data));
    // The browser tries again by itself: the page says so, and asks for what it missed meanwhile.
    events.onerror = () => { page.isLost = true; tellStatus(); };
    setInterval(async () => {
      const name = this.name;
      if (page.isLost || !page.runs[0].run.phase) return; // no process is at work on it
      const { doing } = await this.ask("doing", { run: name }).catch(() => ({}));
      if (doing === undefined || name !== this.name) return;
      page.runs[0].run.doing = doing;
      tellStatus();
    }, 5000);
    events.onopen = () => { const wasLost = page.isLost; page.isLost = false; if (wasLost) onchange(); };
  }
}

function showRuns(main, place) {
  const beside = new Set((place.beside ?? "").split(",").filter(Boolean));
  const box = (name) => element("input", { type: "checkbox", name, checked: beside.has(name), "aria-label": `curves of ${name}`, onchange: (event) => {
    if (event.target.checked) beside.add(name); else beside.delete(name);
    go({ view: "runs", run: page.source.name, beside: [...beside].join(",") });
  } });
  const link = (run) => element("a", { href: hashOf({ view: "run", run: run.name, beside: place.beside }) }, visible(run.name, 80));
  render(main, element("p", { class: "quiet" }, "Tick runs to draw their curves beside those of the run you open."),
    table(["beside", "run", "score", "status", "step", "updated"], page.source.runs.map((run) =>
      [box(run.name), link(run), run.score && `${scoreText(run.score, run.value)} ${run.score.replaceAll("_", " ")}`, run.status, run.step, `${duration(Date.now() / 1000 - run.updated)} ago`]), [4]));
}

VIEWS.runs = showRuns;
document.querySelector("header nav").prepend(element("a", { href: "#view=runs" }, "Runs"));
start(new LiveSource());
