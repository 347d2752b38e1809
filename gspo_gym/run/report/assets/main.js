"use strict";
// The page: three views of a run, at a place that the address names, from data in the file or from a live server.

const VIEWS = { run: showRun, curves: showCurves, episodes: showEpisodes };
const page = { runs: [], steps: new Map(), episodes: null, first: "run" };

// "#view=episodes&step=step_000012&episode=step_000012/group_0003/1&token=0:38" is a place that can be sent.
function placeNow() {
  return { view: page.first, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
}

// A place names its run where there are several: the one that is shown first is another one soon.
function hashOf(place) {
  const { run = page.source?.name, beside } = placeNow();
  place = { ...(place.run ? {} : { run, beside }), ...place };
  return `#${new URLSearchParams(Object.entries(place).filter(([, value]) => value)).toString().replaceAll("%2F", "/").replaceAll("%3A", ":")}`;
}

function go(place) {
  location.hash = hashOf(place);
}

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Data of a saved page. `live.js` puts a source that asks a server in its place.
class SavedSource {
  async open() {
    this.data = await unpacked(document.getElementById("data").textContent);
    return this.data.runs;
  }

  steps() {
    return this.data.steps.map((step) => step.name);
  }

  async step(name) {
    return this.data.steps.find((step) => step.name === name) ?? null;
  }
}

function showRun(main) {
  const run = page.runs[0];
  const scored = run.evaluations.filter((each) => each.value !== null);
  const [first, last] = [scored[0], scored.at(-1)];
  const shown = ({ score, value }) => scoreText(score, value);
  const interval = ({ score, low, high }) => scoreText(score, low, high);
  forgetCharts();
  const curve = element("div");
  main.replaceChildren(
    element("div", { class: "columns" },
      element("section", {}, element("h2", {}, "Result"), last ? [
        element("p", { class: "big" }, first === last ? shown(last) : `${shown(first)} → ${shown(last)}`),
        curve, element("p", { class: "quiet" }, `${last.score.replace("_", " ")} of ${last.num_episodes} held-out episodes; 95% intervals ${interval(first)}`, first === last ? "" : `, then ${interval(last)}`),
      ] : element("p", { class: "quiet" }, "Not evaluated yet.")),
      element("section", {}, element("h2", {}, "Run"), facts([
        ...Object.entries(run.about), ["status", run.run.status], ["step", run.run.step], ["error", run.run.error],
        ["time", duration(run.run.wall_seconds)], ["sampled tokens", run.run.sampled_tokens?.toLocaleString("en")],
        ["tokens trained on", run.run.trained_tokens?.toLocaleString("en")], ["folder", run.run.folder], ["id", run.run.run],
      ]))),
    findings(run), settings(run), otherRuns(),
    element("h2", {}, "Events"),
    table(["step", "event", "data"], run.events.map((event) => [event.step, event.kind, event.text]), [0]));
  if (last) evaluationChart(curve, page.runs);
}

function findings(run) {
  if (!run.findings) return element("span");
  return element("section", {}, element("h2", {}, "What the doctor says"),
    run.findings.length ? run.findings.map((finding) => element("div", { class: `finding ${finding.severity}` },
      element("b", {}, `${finding.severity}: ${finding.problem}`), element("div", { class: "quiet" }, finding.evidence),
      element("div", {}, finding.key ? `${finding.key}: ${finding.suggestion}` : finding.suggestion))) : element("p", {}, "Nothing is wrong with it."),
    element("p", { class: "quiet" }, run.checked));
}

function settings(run) {
  if (!run.settings) return element("span");
  return element("section", {}, element("h2", {}, "Settings that differ from their defaults"),
    table(["key", "value", "default"], run.settings.map(([key, value, usual]) => [key, JSON.stringify(value), usual === null ? "–" : JSON.stringify(usual)])));
}

function otherRuns() {
  if (page.runs.length < 2) return element("span");
  return element("section", {}, element("h2", {}, "Beside"),
    table(["run", "status", "step", "score", "time"], page.runs.map(({ run, evaluations }) => [run.label, run.status, run.step, number(evaluations.at(-1)?.value, 4), duration(run.wall_seconds)]), [2, 3]));
}

function showCurves(main) {
  const charts = element("div");
  const draw = () => {
    forgetCharts();
    charts.replaceChildren();
    curveCharts(charts, page.runs);
  };
  const search = searchField("loss, clip, reward…", chartSettings.wanted, (wanted) => { chartSettings.wanted = wanted; draw(); });
  const smooth = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chartSettings.smooth, oninput: () => { chartSettings.smooth = Number(smooth.value); draw(); } });
  const box = (name) => element("input", { type: "checkbox", checked: chartSettings[name], onchange: (event) => { chartSettings[name] = event.target.checked; draw(); } });
  const { stride } = page.runs[0].metrics;
  render(main, element("div", { class: "bar", role: "toolbar", "aria-label": "Curves" },
    search, element("label", {}, "Smooth ", smooth), element("label", {}, box("log"), " log scale"), eventKinds(page.runs[0].events).size ? element("label", {}, box("events"), " events") : null,
    element("span", { class: "quiet" }, `${isTouched ? "Tap" : "Point at"} a chart to read all at that step${stride > 1 ? `; every ${stride}th step is drawn` : ""}.`)), charts);
  draw();
}

async function showEpisodes(main, place) {
  const steps = page.source.steps();
  const name = steps.includes(place.step) ? place.step : steps.at(-1);
  if (!name) { main.replaceChildren(element("p", {}, "No episodes are recorded.")); return; }
  if (!page.steps.has(name)) page.steps.set(name, await page.source.step(name));
  page.episodes ??= new EpisodesView(main, place, go);
  page.episodes.place = place;
  await page.episodes.show(page.steps.get(name), steps);
}

function tellStatus() {
  const { run } = page.runs[0], runs = placeNow().view === "runs" && page.source.runs;
  document.getElementById("title").textContent = runs ? "Runs" : visible(run.label, 80);
  const status = runs ? `${runs.length} in this folder` : `${run.status}${run.doing ? `, ${run.doing}` : ""}, step ${run.step}`;
  document.getElementById("status").textContent = `${status}${page.isLost ? " (not connected)" : ""}`;
}

async function show() {
  const place = placeNow();
  const view = VIEWS[place.view] ? place.view : "run";
  document.querySelectorAll("nav a").forEach((link) => {
    const target = new URLSearchParams(link.hash.slice(1)).get("view");
    link.href = hashOf({ view: target });
    if (target === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  if (page.source.watch && runsOf(place) !== page.asked) await open(place);
  tellStatus();
  await VIEWS[view](document.getElementById("main"), place);
}

function onKey(event) {
  if (event.target.matches("input:not([type=checkbox]), select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const isEpisodes = placeNow().view === "episodes" && page.episodes;
  const steps = page.source.steps();
  const moveStep = (by) => page.episodes.visit({ step: steps[Math.min(steps.length - 1, Math.max(0, steps.indexOf(page.episodes.step.name) + by))] });
  const keys = {
    "0": () => VIEWS.runs && go({ view: "runs" }), "1": () => go({ view: "run" }), "2": () => go({ view: "curves" }), "3": () => go({ view: "episodes" }),
    "?": () => document.getElementById("help").showModal(),
    ...(isEpisodes && {
      j: () => page.episodes.move(1), k: () => page.episodes.move(-1), n: () => moveStep(1), p: () => moveStep(-1),
      t: () => page.episodes.toggle(), c: () => { page.episodes.nextColour(); show(); },
      ArrowRight: () => page.episodes.moveToken(1), ArrowLeft: () => page.episodes.moveToken(-1),
    }),
  };
  if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
}

// In a notebook's frame, links would lead to places in the notebook.
function onClick(event) {
  const link = event.target.closest('a[href^="#"]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  if (link.matches(".skip")) document.getElementById("main").focus();
  else location.hash = link.hash;
}

function runsOf(place) {
  return `${place.run ?? page.source.name}|${place.beside}`;
}

async function open(place) {
  page.runs = await page.source.open(place);
  page.asked = runsOf(place);
  page.steps.clear();
}

// Steps that have landed are asked for again where one looks, and only there: a table that is read does not jump.
async function onChange() {
  const [place, { scrollY }] = [placeNow(), window];
  const kept = page.steps.get(place.step);
  await open(place);
  if (kept) page.steps.set(place.step, kept);
  if (place.view === "episodes" && kept) return;
  await show();
  window.scrollTo(0, scrollY);
}

async function start(source) {
  page.source = source;
  try {
    await open(placeNow());
  } catch (error) {
    document.getElementById("main").replaceChildren(element("p", { role: "alert" }, visible(error.message)));
    if (source.watch) setTimeout(() => start(source), 1000);
    return;
  }
  if (source.runs?.length > 1) page.first = "runs"; // which the live page lists
  window.addEventListener("hashchange", show);
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", onClick);
  document.getElementById("help-button").addEventListener("click", () => document.getElementById("help").showModal());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  await show();
  source.watch?.(onChange);
  document.documentElement.dataset.ready = "yes";
}
