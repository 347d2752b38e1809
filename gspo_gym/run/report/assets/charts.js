"use strict";
// Curves by uPlot: one hover line through all charts, events as lines, evaluations with their intervals.

const RUN_COLOURS = ["--link", "--mark", "--amount", "--positive", "--negative"];
const WHOLE_STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((power) => [power, 2 * power, 5 * power]);
// What happens in every run, and explains no bend of a curve.
const ROUTINE = new Set(["started", "threads", "warmup", "checkpoint", "finished"]);
const drawnCharts = [];
const chartSettings = { log: false, smooth: 0, events: true, wanted: "", open: new Set() };

// A chart is as wide as its place, also when the window changes.
const places = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const plot = drawnCharts.find(({ root }) => root.parentNode === target), width = Math.floor(contentRect.width);
    if (plot && width > 0 && width !== plot.width) plot.setSize({ width, height: plot.height });
  }
});

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Exponential moving average with the weight `share` on the past, corrected for its start as in Adam.
function smoothed(values, share) {
  if (!share) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

// Runs have steps of their own: all get the union, with null where a run has nothing.
function aligned(tables) {
  const steps = [...new Set(tables.flatMap((each) => each.step))].sort((a, b) => a - b);
  const columns = tables.map((each) => {
    const at = new Map(each.step.map((step, i) => [step, i]));
    return (values) => steps.map((step) => (at.has(step) ? values[at.get(step)] ?? null : null));
  });
  return { steps, columns };
}

// What happened at each step beside the routine, the rarest first, and how often that happened.
function eventKinds(events) {
  const counts = new Map(), steps = new Map();
  for (const { step, kind } of events.filter((event) => !ROUTINE.has(event.kind))) {
    counts.set(kind, (counts.get(kind) ?? 0) + 1);
    steps.set(step, (steps.get(step) ?? new Set()).add(kind));
  }
  return new Map([...steps].sort(([a], [b]) => a - b).map(([step, kinds]) => {
    const sorted = [...kinds].sort((a, b) => counts.get(a) - counts.get(b));
    return [step, { count: counts.get(sorted[0]), names: sorted.map((kind) => visible(kind, 40)) }];
  }));
}

// Of each step at which something happened: its pixel, and what it was where no other text is, that of rare things first.
function eventMarks(kinds, pixelOf, widthOf, [first, last]) {
  const marks = [...kinds].map(([step, { count, names: [name, ...more] }]) => {
    const x = pixelOf(step), label = more.length ? `${name} +${more.length}` : name;
    const left = Math.min(x, last - widthOf(label));
    return { x, left, right: left + widthOf(label), label, count };
  }).filter(({ x }) => first <= x && x <= last);
  const written = [];
  for (const mark of [...marks].sort((a, b) => a.count - b.count)) {
    const isFree = mark.left >= first && written.every(({ left, right }) => mark.right <= left || right <= mark.left);
    mark.text = isFree ? mark.label : "";
    if (isFree) written.push(mark);
  }
  return marks;
}

function eventLines(kinds) {
  return {
    hooks: {
      draw: ({ ctx, bbox, valToPos }) => {
        const size = uPlot.pxRatio;
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = colour("--mark");
        ctx.font = `${10 * size}px system-ui, sans-serif`;
        ctx.textAlign = "left";
        ctx.textBaseline = "bottom";
        ctx.setLineDash([2 * size, 4 * size]);
        const widthOf = (text) => ctx.measureText(text).width + 8 * size;
        for (const { x, left, text } of eventMarks(kinds, (step) => valToPos(step, "x", true), widthOf, [bbox.left, bbox.left + bbox.width])) {
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.fillText(text, left, bbox.top - 3 * size);
        }
        ctx.restore();
      },
    },
  };
}

// What the chart says at the step that is pointed at; before any is, the last values of the runs.
function readout(place, steps, series, kinds) {
  return (plot) => {
    const at = plot.cursor.idx;
    place.replaceChildren(element("span", {}, at === null || at === undefined ? "last" : `step ${steps[at]}`), ...series.filter(({ hidden }) => !hidden).map(({ label, tint, values, text }) => {
      const i = at ?? values.findLastIndex((one) => one !== null);
      const value = element("b", { class: text ? "long" : null }, text ? text(i) : number(values[i], 5));
      value.style.color = `var(${tint})`;
      return element("span", { class: "value" }, page.runs.length > 1 ? `${visible(label, 24)} ` : null, value);
    }), element("span", { class: "event" }, (kinds.get(steps[at])?.names ?? []).join(", ")));
  };
}

function chart(target, { title, help, steps, series, bands = [], events = [] }) {
  const reading = element("p", { class: "readout" });
  const drawn = element("div", { class: "plot", role: "img", "aria-label": `${title}: ${summary(series[0].values)}` });
  target.append(element("figure", {}, element("figcaption", {}, element("b", {}, visible(title)),
    help ? element("span", { class: "quiet" }, ` ${help}`) : null), reading, drawn));
  const isLog = chartSettings.log && series.every(({ values }) => values.every((value) => value === null || value > 0));
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const kinds = eventKinds(chartSettings.events ? events : []);
  const tell = readout(reading, steps, series, kinds);
  const plot = new uPlot({
    width: Math.floor(drawn.clientWidth) || 400,
    height: 200,
    padding: [kinds.size ? 18 : 8, 8, null, null],
    cursor: { sync: { key: "steps" }, y: false },
    legend: { show: false },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: [{ ...axis, incrs: WHOLE_STEPS, size: 32 }, { ...axis, size: 58, ...(isLog ? {} : { values: (_, ticks) => ticks.map((tick) => (tick && Math.abs(tick) < 1e-3 ? Number(tick.toPrecision(6)).toExponential() : number(tick, 6))) }) }],
    plugins: [eventLines(kinds)],
    hooks: { ready: [tell], setCursor: [tell] },
    bands,
    series: [{ label: "step" }, ...series.map(({ label, tint, hidden, points }) => ({
      label: visible(label), stroke: colour(tint), width: hidden ? 0 : 1.5, spanGaps: true, points: { show: Boolean(points) },
    }))],
  }, [steps, ...series.map(({ values }) => values)], drawn);
  drawnCharts.push(plot);
  places.observe(drawn);
}

// Charts that are replaced would go on following the hover line.
function forgetCharts() {
  places.disconnect();
  for (const plot of drawnCharts.splice(0)) plot.destroy();
}

function summary(values) {
  const given = values.filter((value) => value !== null);
  if (!given.length) return "no values";
  const [least, most] = [Math.min(...given), Math.max(...given)];
  return `first ${number(given[0], 4)}, last ${number(given.at(-1), 4)}, from ${number(least, 4)} to ${number(most, 4)}`;
}

// The value of an evaluation, or the ends of its interval, as its score is written.
function scoreText(score, ...values) {
  if (values.includes(null)) return "";
  return values.map((value) => (score === "success_rate" ? percent(value) : number(value, 4))).join(" to ");
}

function evaluationChart(target, runs) {
  const tables = runs.map(({ evaluations }) => ({ step: evaluations.map((each) => each.step), evaluations }));
  const { steps, columns } = aligned(tables);
  if (steps.length < 2) return;
  const score = runs[0].evaluations.at(-1)?.score ?? "score";
  const series = [], bands = [];
  runs.forEach((run, i) => {
    const tint = RUN_COLOURS[i % RUN_COLOURS.length];
    const [values, high, low] = ["value", "high", "low"].map((key) => columns[i](run.evaluations.map((each) => each[key])));
    const interval = (at) => scoreText(score, low[at], high[at]);
    series.push({ label: run.run.label, values, tint, points: true, text: (at) => `${scoreText(score, values[at]) || "–"}${interval(at) && ` (${interval(at)})`}` });
    series.push({ label: "95% high", values: high, tint, hidden: true }, { label: "95% low", values: low, tint, hidden: true });
    bands.push({ series: [series.length - 1, series.length], fill: `color-mix(in srgb, ${colour(tint)} 18%, transparent)` });
  });
  chart(target, { title: `evaluation: ${score}`, help: "of held-out tasks, with 95% intervals", steps, series, bands, events: runs[0].events });
}

// The metrics of all runs by name, and whether one has more than one value: only then is there a curve to draw.
function metricsOf(runs) {
  const { steps, columns } = aligned(runs.map(({ metrics }) => metrics));
  const names = [...new Set(runs.flatMap(({ metrics }) => Object.keys(metrics.values)))].sort();
  return { steps, metrics: names.map((name) => {
    const values = runs.map((run, i) => (run.metrics.values[name] ? columns[i](run.metrics.values[name]) : null));
    const known = new Set(values.flat().filter((value) => value !== null));
    return { name, values, help: runs[0].metrics.help[name] ?? "", isConstant: known.size < 2, value: [...known][0] };
  }) };
}

function metricChart(target, runs, steps, { name, help, values }) {
  const series = runs.flatMap((run, i) => (values[i] ? [{
    label: run.run.label, tint: RUN_COLOURS[i % RUN_COLOURS.length], values: smoothed(values[i], chartSettings.smooth),
  }] : []));
  chart(target, { title: name, help, steps, series, events: runs[0].events });
}

// What is looked at first; the rest by group, drawn when a group is opened or searched; and what never changed, as a list.
function curveCharts(target, runs) {
  const { steps, metrics } = metricsOf(runs), { wanted } = chartSettings;
  const shown = metrics.filter(({ name, help }) => `${name} ${help}`.toLowerCase().includes(wanted.toLowerCase()));
  if (!wanted) {
    const charts = element("div", { class: "charts" });
    target.append(element("section", { "aria-label": "key curves" }, charts));
    evaluationChart(charts, runs);
    for (const key of runs[0].metrics.key) for (const metric of metrics) if (metric.name === key && !metric.isConstant) metricChart(charts, runs, steps, metric);
  }
  const fold = (title, count, names, fill) => {
    const place = element("div"), open = chartSettings.open;
    const ontoggle = () => {
      if (!wanted) open[details.open ? "add" : "delete"](title);
      if (details.open && !place.hasChildNodes()) fill(place);
    };
    const details = element("details", { class: "group", open: wanted !== "" || open.has(title), ontoggle },
      element("summary", {}, element("h2", {}, title), element("span", { class: "quiet" }, `${count} ${names.join(", ")}`)), place);
    target.append(details);
    if (details.open) fill(place);
  };
  const groups = new Map();
  for (const metric of shown.filter(({ isConstant }) => !isConstant)) {
    const group = metric.name.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), metric]);
  }
  for (const [group, members] of groups) {
    fold(group, members.length, members.map(({ name }) => name.slice(group.length + 1)), (place) => {
      const charts = element("div", { class: "charts" });
      place.append(charts);
      for (const metric of members) metricChart(charts, runs, steps, metric);
    });
  }
  const constant = shown.filter(({ isConstant }) => isConstant);
  if (constant.length) fold("constant", constant.length, constant.map(({ name }) => name), (place) =>
    place.append(table(["metric", "value", "what it is"], constant.map(({ name, value, help }) => [name, number(value, 6), help]), [1])));
  if (!shown.length) target.append(element("p", {}, "No metric has such a name."));
}
