"use strict";
// Elements and texts. Every text of a run reaches the page through `textContent`: nothing of it is ever markup.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return made;
}

// float32 has at most 9 significant decimal digits; null is "not measured" and never 0.
function number(value, digits = 9) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return String(Number(Number(value).toPrecision(digits)));
}

function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : "") + number(value, digits);
}

function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 59.95) return `${number(seconds, 3)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const CONTROL = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const MAX_SHOWN = 4000;

// Control characters, ANSI codes, marks of writing direction and invisible tags are shown as their code points.
function visible(text, limit = MAX_SHOWN) {
  const cut = text.length > limit ? `${text.slice(0, limit)}… (${text.length.toLocaleString("en")} characters)` : text;
  return cut.replace(CONTROL, (mark) => `⟨${mark.codePointAt(0).toString(16).padStart(4, "0")}⟩`);
}

// `inline`: one pair beside the other, as many as a line has room for.
function facts(pairs, inline = false) {
  return element("dl", { class: inline ? "facts inline" : "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => {
    const pair = [element("dt", {}, name), element("dd", {}, value instanceof Node ? value : visible(String(value)))];
    return inline ? element("div", {}, pair) : pair;
  }).flat());
}

function table(heads, rows, numeric = []) {
  const kind = (i) => (numeric.includes(i) ? { class: "number" } : {});
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, heads.map((head, i) => element("th", { scope: "col", ...kind(i) }, head)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell, i) => element("td", kind(i),
      cell instanceof Node ? cell : visible(String(cell ?? "–")))))))));
}

function chooser(label, values, chosen, onchange) {
  const select = element("select", { name: label, onchange: () => onchange(select.value) },
    values.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
  return element("label", {}, `${label} `, select);
}

// Replaces what a place shows. The control that has the focus keeps it: controls are known by their name.
function render(place, ...children) {
  const { name, selectionEnd } = document.activeElement ?? {};
  place.replaceChildren(...children);
  const again = name ? [...place.querySelectorAll("[name]")].find((each) => each.name === name) : null;
  again?.focus({ preventScroll: true });
  if (again?.type === "search") again.setSelectionRange(selectionEnd, selectionEnd);
}

function searchField(placeholder, value, oninput) {
  const field = element("input", { type: "search", name: "find", placeholder, value, oninput: () => oninput(field.value) });
  return element("label", {}, "Find ", field);
}

const isTouched = matchMedia("(hover: none)").matches;

// Scrolls to it, and again once the turns on the way, which have no size before they are seen, have one.
function bring(place, options) {
  const scroll = () => place?.scrollIntoView(options);
  scroll();
  requestAnimationFrame(() => requestAnimationFrame(scroll));
}
