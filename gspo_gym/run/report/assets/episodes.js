"use strict";
// Episodes: groups of siblings, a conversation turn by turn, and every token with all its numbers.

// What colours the tokens: the column's value, and whether it has a middle (ratio 1, advantage 0).
const COLOURS = {
  logprob: { text: "logprob of the engine", of: (token) => token.rollout_logprob, kind: "amount", sign: -1 },
  ratio: { text: "ratio of its unit, log", of: (token) => (token.ratio > 0 ? Math.log(token.ratio) : null), kind: "middle" },
  advantage: { text: "advantage", of: (token) => token.advantage, kind: "middle" },
  entropy: { text: "entropy", of: (token) => token.entropy, kind: "amount", sign: 1 },
  gap: { text: "learner less engine, logprob", of: (token) => difference(token.old_logprob, token.rollout_logprob), kind: "middle" },
  version: { text: "version of the weights", of: (token) => token.weight_version, kind: "name" },
  loss: { text: "share of the loss", of: (token) => token.share, kind: "middle" },
  none: { text: "nothing", of: () => null, kind: "amount", sign: 1 },
};

const FILTERS = {
  all: ["all", () => true],
  failed: ["failed", (episode) => episode.success === false || episode.error !== null],
  succeeded: ["succeeded", (episode) => episode.success === true],
  clipped: ["clipped", (episode, pass) => episode.clipped[pass] === true],
  masked: ["sampled and not trained on", (episode) => episode.masked],
  disagree: ["judge and environment disagree", (episode) => episode.disputed],
  versions: ["version changed inside", (episode) => episode.mixed],
};

const ORDERS = {
  played: ["as played", null],
  best: ["highest return", (episode) => -(episode.return ?? -Infinity)],
  worst: ["lowest return", (episode) => episode.return ?? Infinity],
  loss: ["largest share of the loss", (episode) => -Math.abs(episode.loss)],
};

const TOKEN_NUMBERS = [
  ["turn", "turn"], ["token id", "id"], ["logprob, engine", "rollout_logprob"], ["logprob, old", "old_logprob"],
  ["logprob, now", "logprob"], ["logprob, reference", "ref_logprob"], ["advantage", "advantage"],
  ["ratio of its unit", "ratio"], ["clip bound", "clip"], ["correction weight", "correction"], ["entropy, nats", "entropy"],
  ["share of the loss", "share"], ["version of the weights", "weight_version"], ["what became of it", "fate"],
];

function difference(a, b) {
  return a === null || a === undefined || b === null || b === undefined ? null : a - b;
}

// Gives the sampled tokens of a group's episodes their numbers by name; those of a pass over the batch are that pass's.
function readTokens(episodes, names, pass) {
  for (const episode of episodes) {
    let at = 0;
    const columns = { ...episode.columns, ...episode.passes[Math.min(pass, episode.passes.length - 1)] };
    episode.tokens = episode.segments.flatMap((segment, s) => segment.sampled.map((position) => {
      const token = { segment: s, position, id: segment.ids[position], turn: turnAt(episode, s, position) };
      for (const [name, values] of Object.entries(columns)) token[name] = names[name]?.[values[at]] ?? values[at];
      at += 1;
      return token;
    }));
  }
}

function tokensOf(episode) {
  return episode.tokens;
}

// Of an episode among those of its step: with its group, which an order by return does not show.
function nameIn(step, episode) {
  const prefix = `${step.name}/`;
  return episode.id.startsWith(prefix) ? episode.id.slice(prefix.length) : episode.id;
}

function turnAt(episode, segment, position) {
  return episode.turns.findIndex((turn) => turn.segment === segment && turn.action[0] <= position && position < turn.action[1]);
}

function tint(span, value, key, scale) {
  const { kind } = COLOURS[key];
  if (value === null || value === undefined) return;
  if (kind === "name") {
    span.style.background = `color-mix(in srgb, ${colour(RUN_COLOURS[Math.abs(value) % RUN_COLOURS.length])} 35%, transparent)`;
    return;
  }
  const share = Math.round(70 * Math.min(1, Math.abs(value) / scale));
  const name = kind === "middle" ? (value > 0 ? "--tint-positive" : "--tint-negative") : "--tint-amount";
  if (share) span.style.background = `color-mix(in srgb, var(${name}) ${share}%, transparent)`;
}

class EpisodesView {
  constructor(main, place, go) {
    Object.assign(this, { main, place, go });
    this.colour = null;
    this.filter = "all";
    this.order = "played";
    this.pass = 0;
  }

  async show(step, steps) {
    this.step = step;
    this.pass = Math.min(this.pass, step.num_passes - 1);
    this.all = step.groups.flatMap((group) => group.episodes.map((episode) => ({ episode, group })));
    const key = ORDERS[this.order][1];
    this.listed = this.all.filter(({ episode }) => FILTERS[this.filter][1](episode, this.pass));
    if (key) this.listed.sort((a, b) => key(a.episode) - key(b.episode));
    this.current = this.all.find(({ episode }) => episode.id === this.place.episode) ?? this.listed[0] ?? this.all[0];
    this.colour ??= "advantage" in step.scales[0] ? "advantage" : "logprob";
    this.scale = step.scales[this.pass][this.colour] ?? 1;
    const { current } = this;
    if (current) await this.load(current.group);
    if (current !== this.current || step !== this.step) return; // another was chosen meanwhile, and is shown
    this.main.replaceChildren(this.bar(steps), this.sum(), element("div", { class: "play" }, this.list(), this.middle(), this.detail = element("aside", { class: "detail", "aria-live": "polite", "aria-label": "Token" })));
    if (this.place.token) this.choose(this.place.token, false);
    else this.detail.append(element("p", { class: "quiet" }, "Hover over a sampled token, or press Tab and the arrow keys, to see its numbers."));
  }

  // A saved page has the tokens of all groups, a live one asks for those of a group when it is looked at.
  async load(group) {
    const { step } = this;
    if (!("segments" in group.episodes[0])) {
      const { episodes, vocabulary } = await page.source.group(step.name, step.groups.indexOf(group));
      group.episodes.forEach((episode, i) => Object.assign(episode, episodes[i]));
      step.vocabulary = { ...step.vocabulary, ...vocabulary };
    }
    readTokens(group.episodes, step.names, this.pass);
  }

  bar(steps) {
    const again = (name) => (value) => { this[name] = value; this.show(this.step, steps); };
    const named = (choices) => Object.entries(choices).map(([value, [text]]) => [value, text]);
    return element("div", { class: "bar", role: "toolbar", "aria-label": "Episodes" },
      chooser("Step", steps.map((name) => [name, name]), this.step.name, (name) => this.go({ view: "episodes", step: name })),
      chooser("Show", named(FILTERS), this.filter, again("filter")),
      chooser("Order", named(ORDERS), this.order, again("order")),
      chooser("Colour", Object.entries(COLOURS).map(([value, { text }]) => [value, text]), this.colour, again("colour")),
      this.step.num_passes > 1 ? chooser("Pass", [...Array(this.step.num_passes).keys()].map((i) => [String(i), `${i + 1} of ${this.step.num_passes}`]), String(this.pass), (value) => { this.pass = Number(value); this.show(this.step, steps); }) : null,
      this.legend());
  }

  legend() {
    const { kind } = COLOURS[this.colour];
    const swatch = (share, name) => {
      const made = element("span", { class: "swatch" });
      made.style.background = `color-mix(in srgb, var(${name}) ${share}%, transparent)`;
      return made;
    };
    if (kind === "name" || this.colour === "none") return element("span", { class: "legend" });
    const most = number(this.scale, 3);
    return kind === "middle"
      ? element("span", { class: "legend" }, `−${most}`, swatch(70, "--tint-negative"), swatch(0, "--tint-positive"), swatch(70, "--tint-positive"), `+${most}`)
      : element("span", { class: "legend" }, "0", swatch(0, "--tint-amount"), swatch(70, "--tint-amount"), `${COLOURS[this.colour].sign < 0 ? "−" : ""}${most}`);
  }

  // The page adds up: what all tokens of the step contribute is the loss that the run recorded.
  sum() {
    const known = this.all.filter(({ episode }) => episode.loss !== null);
    const left = this.step.num_episodes - this.all.length;
    const sum = known.reduce((total, { episode }) => total + episode.loss, 0);
    return element("p", { class: "quiet" },
      known.length ? ["The shares of the loss that are shown here sum to ", element("b", { id: "loss-sum" }, number(sum)), `; loss/total of the step is ${number(this.step.loss)}.`] : "What the learner saw of these tokens is not recorded (run.log_tokens_every_n_iters).",
      left > 0 ? ` ${left} of the step's ${this.step.num_episodes} episodes are not in this file; gspo-gym view shows all.` : "");
  }

  list() {
    const items = [];
    let last = null;
    for (const each of this.listed) {
      // Evaluations play a task once: their groups of one have the environment's name once for all.
      const heading = each.group.episodes.length > 1 ? each.group.task : each.group.environment;
      if (this.order === "played" && heading !== last) items.push(element("h3", {}, visible(heading, 80)));
      last = heading;
      const { episode } = each;
      const mark = episode.success === true ? "✓" : episode.success === false ? "✗" : episode.error ? "!" : "·";
      items.push(element("button", {
        type: "button", "aria-current": each === this.current ? "true" : null,
        onclick: () => this.go({ view: "episodes", step: this.step.name, episode: episode.id }),
      }, element("span", {}, `${mark} ${visible(nameIn(this.step, episode), 60)}`),
      element("span", { class: episode.return > 0 ? "positive" : episode.return < 0 ? "negative" : "" }, signed(episode.return))));
    }
    if (!items.length) items.push(element("p", { class: "quiet" }, "No episode of this step is like that."));
    return element("nav", { class: "list", "aria-label": `${this.listed.length} episodes` }, items);
  }

  middle() {
    if (!this.current) return element("p", {}, "This step has no episodes.");
    const { episode, group } = this.current;
    const reasons = episode.judge?.outcome;
    return element("article", { "aria-label": episode.id },
      element("h2", {}, visible(episode.id, 120)),
      facts([
        ["task", episode.task], ["outcome", episode.outcome + (episode.success === null ? "" : episode.success ? ", success" : ", no success")],
        ["return", signed(episode.return, 6)], ["error", episode.error], ["attempt", episode.attempt || null],
        ["share of the loss", episode.loss === null ? null : number(episode.loss, 6)], ["seconds", number(episode.seconds, 3)],
        ["judge", reasons ? `${number(reasons.total, 4)} ${reasons.summary}` : null],
      ]),
      reasons ? this.criteria(reasons) : null,
      group.episodes.length > 1 ? this.siblings(group) : null,
      element("h3", {}, "Turn by turn"),
      episode.turns.map((turn, i) => this.turn(episode, turn, i)),
      element("details", {}, element("summary", {}, "As a conversation"), episode.messages.map((message) => this.message(message))));
  }

  criteria(review) {
    return table(["criterion", "score", "reason"], Object.entries(review.criteria).map(([name, { score, reason }]) => [name, number(score, 4), reason]), [1]);
  }

  // Siblings side by side, each from the token at which it leaves the last of the others.
  siblings(group) {
    const rows = group.episodes.map((sibling) => {
      const strip = element("div", { class: "tokens" });
      for (const token of tokensOf(sibling).slice(0, 400)) strip.append(this.span(sibling, token.segment, token.position, token), " ");
      return [element("button", { type: "button", onclick: () => this.go({ view: "episodes", step: this.step.name, episode: sibling.id }) },
        visible(sibling.id.split("/").at(-1), 30)), signed(sibling.return), strip];
    });
    return element("details", { class: "siblings", open: group.episodes.length <= 16 },
      element("summary", {}, `${group.episodes.length} episodes of this task; a bar marks where each leaves the others`),
      table(["episode", "return", "sampled tokens"], rows, [1]));
  }

  turn(episode, turn, i) {
    const segment = episode.segments[turn.segment];
    const sampled = new Map(tokensOf(episode).filter((token) => token.segment === turn.segment).map((token) => [token.position, token]));
    const strip = element("div", { class: "tokens" });
    for (let at = turn.observation[0]; at < turn.action[1]; at++) strip.append(this.span(episode, turn.segment, at, sampled.get(at)));
    // Tokens that the template appends after an action belong to no turn's spans before the next observation.
    if (i === episode.turns.length - 1) for (let at = turn.action[1]; at < segment.ids.length; at++) strip.append(this.span(episode, turn.segment, at));
    const review = episode.judge?.events[i];
    return element("section", { class: "turn", "aria-label": `turn ${i}` },
      element("div", { class: "turn-head" }, element("b", {}, `turn ${i}`),
        element("span", {}, `reward ${signed(turn.reward)}`),
        Object.entries(turn.terms).map(([name, value]) => element("span", {}, `${visible(name, 40)} ${signed(value)}`)),
        turn.events.map((event) => element("span", { class: "positive" }, visible(event, 60))),
        turn.finish !== "stop" ? element("span", {}, `ended by ${turn.finish}`) : null,
        turn.parse !== "ok" ? element("span", { class: "negative" }, turn.parse) : null),
      strip, review ? element("div", {}, `judge ${number(review.total, 4)} ${visible(review.summary)}`, this.criteria(review)) : null);
  }

  // Parts of a character are read together: the first of them has all of it, and the others say that they belong to it.
  textAt(episode, segment, position) {
    const { ids, texts } = episode.segments[segment];
    return (texts?.[position] ?? this.step.vocabulary[ids[position]] ?? `⟨${ids[position]}⟩`) || "‿";
  }

  span(episode, segment, position, token = null) {
    const text = this.textAt(episode, segment, position);
    const leaves = episode.diverges && episode.diverges[0] === segment && episode.diverges[1] === position;
    const kind = token ? `sampled${token.fate && token.fate !== "trained" ? " masked" : ""}` : "environment";
    const made = element("span", { class: `token ${kind}${leaves ? " leaves" : ""}` }, visible(text).replaceAll("\n", "↵\n"));
    if (!token) return made;
    const value = COLOURS[this.colour].of(token);
    tint(made, value, this.colour, this.scale);
    made.tabIndex = 0;
    made.dataset.place = `${episode.id}|${segment}:${position}`;
    made.setAttribute("role", "button");
    made.setAttribute("aria-label", `${visible(text, 40)}, ${COLOURS[this.colour].text} ${number(value, 4)}`);
    const tell = () => this.tell(episode, token, made);
    made.addEventListener("mouseenter", tell);
    made.addEventListener("focus", tell);
    made.addEventListener("click", () => this.go({ view: "episodes", step: this.step.name, episode: episode.id, token: `${segment}:${position}` }));
    return made;
  }

  tell(episode, token, span) {
    this.main.querySelectorAll(".chosen").forEach((each) => each.classList.remove("chosen"));
    span.classList.add("chosen");
    const { texts } = episode.segments[token.segment];
    let first = token.position;
    while (texts?.[first] === "") first -= 1;
    const text = this.textAt(episode, token.segment, first);
    const alone = this.step.vocabulary[token.id] ?? text;
    this.detail.replaceChildren(element("h3", {}, `Token ${token.segment}:${token.position}`),
      element("pre", { class: "message" }, visible(text === alone ? text : `${alone} in ${text}`)),
      facts(TOKEN_NUMBERS.map(([name, key]) => [name, this.cell(key, token[key])])),
      element("p", {}, element("a", { href: hashOf({ view: "episodes", step: this.step.name, episode: episode.id, token: `${token.segment}:${token.position}` }) }, "Link to this token")));
  }

  cell(key, value) {
    if (value === null || value === undefined) return null;
    return element("span", { "data-name": key }, typeof value === "number" ? number(value) : visible(String(value)));
  }

  choose(place, focus = true) {
    const span = [...this.main.querySelectorAll("article > .turn .token.sampled")].find((each) => each.dataset.place.endsWith(`|${place}`));
    if (!span) return;
    if (focus) span.focus();
    span.scrollIntoView({ block: "center" });
    const [segment, position] = place.split(":").map(Number);
    const token = tokensOf(this.current.episode).find((each) => each.segment === segment && each.position === position);
    this.tell(this.current.episode, token, span);
  }

  message(message) {
    const calls = message.tool_calls ? JSON.stringify(message.tool_calls, null, 1) : "";
    const parts = [message.reasoning_content ? `(reasoning) ${message.reasoning_content}` : "", message.content, calls].filter(Boolean);
    return element("div", { class: `message ${message.role}` }, element("span", { class: "role" }, message.role), visible(parts.join("\n"), 20000));
  }

  move(by) {
    const at = this.listed.indexOf(this.current);
    const next = this.listed[Math.min(this.listed.length - 1, Math.max(0, at + by))];
    if (next) this.go({ view: "episodes", step: this.step.name, episode: next.episode.id });
  }

  moveToken(by) {
    const spans = [...this.main.querySelectorAll("article > .turn .token.sampled")];
    spans[spans.indexOf(document.activeElement) + by]?.focus();
  }

  nextColour() {
    const names = Object.keys(COLOURS);
    this.colour = names[(names.indexOf(this.colour) + 1) % names.length];
  }
}
