"use strict";
// Curves by uPlot: one hover line through all charts, events as lines, evaluations with their intervals.

const RUN_COLOURS = ["--link", "--mark", "--amount", "--positive", "--negative"];
const drawnCharts = [];
const chartSettings = { log: false, smooth: 0, events: true };

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

// Steps at which something happened: their pixel, and what it was; no text where it would lie on the one before.
function eventMarks(events, pixelOf, distance) {
  const kinds = new Map();
  for (const { step, kind } of events) kinds.set(step, (kinds.get(step) ?? new Set()).add(visible(kind, 40)));
  let last = -Infinity;
  return [...kinds].sort(([a], [b]) => a - b).map(([step, names]) => {
    const x = pixelOf(step), isFree = x - last >= distance;
    if (isFree) last = x;
    return { x, text: isFree ? [...names].join(", ") : "" };
  });
}

function eventLines(events) {
  return {
    hooks: {
      draw: (plot) => {
        if (!chartSettings.events) return;
        const { ctx, bbox } = plot, size = 10 * uPlot.pxRatio, right = bbox.left + bbox.width;
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = colour("--mark");
        ctx.font = `${size}px system-ui, sans-serif`;
        ctx.textAlign = "right";
        ctx.setLineDash([3, 4]);
        for (const { x, text } of eventMarks(events, (step) => plot.valToPos(step, "x", true), 1.2 * size)) {
          if (x < bbox.left || x > right) continue;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.save();
          ctx.translate(x + (x + 1.2 * size > right ? -0.3 : 1) * size, bbox.top + 2);
          ctx.rotate(-Math.PI / 2);
          ctx.fillText(text, 0, 0, bbox.height - 4);
          ctx.restore();
        }
        ctx.restore();
      },
    },
  };
}

function chart(target, { title, help, steps, series, bands = [], events = [] }) {
  const drawn = element("div", { role: "img", "aria-label": `${title}: ${summary(series[0].values)}` });
  target.append(element("figure", {}, element("figcaption", {}, element("b", {}, visible(title)),
    help ? element("span", { class: "quiet" }, ` ${help}`) : null), drawn));
  const isLog = chartSettings.log && series.every(({ values }) => values.every((value) => value === null || value > 0));
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const plot = new uPlot({
    width: Math.max(280, target.clientWidth ? Math.min(target.clientWidth, 440) : 400),
    height: 190,
    cursor: { sync: { key: "steps" }, y: false },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: [axis, { ...axis, size: 58 }],
    plugins: [eventLines(events)],
    bands,
    series: [{ label: "step" }, ...series.map(({ label, tint, dash, hidden, points }) => ({
      label: visible(label), stroke: colour(tint), width: hidden ? 0 : 1.5, dash, spanGaps: true,
      points: { show: Boolean(points) }, value: (_, value) => number(value, 5), class: hidden ? "bound" : undefined,
    }))],
  }, [steps, ...series.map(({ values }) => values)], drawn);
  drawnCharts.push(plot);
}

// Charts that are replaced would go on following the hover line.
function forgetCharts() {
  for (const plot of drawnCharts.splice(0)) plot.destroy();
}

function summary(values) {
  const given = values.filter((value) => value !== null);
  if (!given.length) return "no values";
  const [least, most] = [Math.min(...given), Math.max(...given)];
  return `first ${number(given[0], 4)}, last ${number(given.at(-1), 4)}, from ${number(least, 4)} to ${number(most, 4)}`;
}

function evaluationChart(target, runs) {
  const tables = runs.map(({ evaluations }) => ({ step: evaluations.map((each) => each.step), evaluations }));
  const { steps, columns } = aligned(tables);
  if (!steps.length) return;
  const series = [], bands = [];
  runs.forEach((run, i) => {
    const tint = RUN_COLOURS[i % RUN_COLOURS.length];
    const of = (key) => columns[i](run.evaluations.map((each) => each[key]));
    series.push({ label: run.run.label, values: of("value"), tint, points: true });
    series.push({ label: "95% high", values: of("high"), tint, hidden: true }, { label: "95% low", values: of("low"), tint, hidden: true });
    bands.push({ series: [series.length - 1, series.length], fill: `color-mix(in srgb, ${colour(tint)} 18%, transparent)` });
  });
  const score = runs[0].evaluations.at(-1)?.score ?? "score";
  chart(target, { title: `evaluation: ${score}`, help: "with 95% intervals", steps, series, bands, events: runs[0].events });
}

function metricCharts(target, runs, wanted) {
  const { steps, columns } = aligned(runs.map(({ metrics }) => metrics));
  const names = [...new Set(runs.flatMap(({ metrics }) => Object.keys(metrics.values)))].filter((name) => name.includes(wanted)).sort();
  const groups = Map.groupBy ? Map.groupBy(names, (name) => name.split("/")[0]) : grouped(names);
  for (const [group, members] of groups) {
    const charts = element("div", { class: "charts" });
    target.append(element("section", { "aria-label": group }, element("h2", {}, group), charts));
    for (const name of members) {
      const series = runs.flatMap((run, i) => run.metrics.values[name] ? [{
        label: run.run.label, tint: RUN_COLOURS[i % RUN_COLOURS.length],
        values: smoothed(columns[i](run.metrics.values[name]), chartSettings.smooth),
      }] : []);
      chart(charts, { title: name, help: runs[0].metrics.help[name], steps, series, events: runs[0].events });
    }
  }
  if (!names.length) target.append(element("p", {}, "No metric has such a name."));
}

function grouped(names) {
  const groups = new Map();
  for (const name of names) groups.set(name.split("/")[0], [...(groups.get(name.split("/")[0]) ?? []), name]);
  return groups;
}
