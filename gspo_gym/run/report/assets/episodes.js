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
  ["logprob, now", "logprob"], ["logprob, reference", "ref_logprob"], ["log of teacher / policy", "teacher_log_ratio"],
  ["KL to the teacher", "teacher_kl"], ["divergence from the teacher", "teacher_divergence"], ["advantage", "advantage"],
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

// A task by what sets it apart: where its first message begins to differ from those of others, or else its seed.
function taskName(group) {
  return group.opening || group.task.replace(/^.*\//, "").replace(/-v\d+#/, " #");
}

// How an episode ended: whether it succeeded comes first, where its environment says so.
function outcomeOf({ success, outcome, fork }) {
  const ended = outcome.replaceAll("_", " "), origin = fork ? `, ${fork}` : "";
  if (success === null) return ended + origin;
  return `${success ? "succeeded" : "failed"}${outcome === "terminated" ? "" : `, ${ended}`}${origin}`;
}

function markOf({ success, error }) {
  return success === true ? "✓" : success === false ? "✗" : error ? "!" : "·";
}

function signOf(value) {
  return value > 0 ? "positive" : value < 0 ? "negative" : "";
}

// The text of a message, and the tools that it calls.
function saidIn({ content, tool_calls: calls = [] }) {
  return [content, ...calls.map((call) => `${call.function.name}(${JSON.stringify(call.function.arguments)})`)].filter(Boolean).join("\n");
}

// Messages by turn: what was answered ends one, and what came after the last answer belongs to the last.
function turnMessages({ messages, turns }) {
  const answers = messages.flatMap(({ role }, i) => (role === "assistant" ? [i] : [])).slice(-turns.length);
  if (!turns.length || answers.length < turns.length) return null;
  return answers.map((end, i) => messages.slice(i ? answers[i - 1] + 1 : 0, i === turns.length - 1 ? undefined : end + 1));
}

class EpisodesView {
  constructor(main, place, go) {
    Object.assign(this, { main, place, go, colour: null, filter: "all", order: "played", wanted: "", pass: 0, seen: 0 });
  }

  // Another step, episode or token, or the same one as a conversation or as tokens: what it is shown as stays.
  visit(place) {
    this.go({ view: "episodes", step: this.step.name, as: this.as === "tokens" && !place.token ? "tokens" : null, ...place });
  }

  async show(step, steps) {
    this.step = step;
    this.steps = steps;
    this.as = this.place.token || this.place.as === "tokens" ? "tokens" : "conversation";
    this.pass = Math.min(this.pass, step.num_passes - 1);
    this.all = step.groups.flatMap((group) => group.episodes.map((episode) => ({ episode, group })));
    this.select();
    this.current = this.all.find(({ episode }) => episode.id === this.place.episode) ?? this.listed[0] ?? this.all[0];
    this.colour ??= "advantage" in step.scales[0] ? "advantage" : "logprob";
    this.scale = step.scales[this.pass][this.colour] ?? 1;
    const { current } = this;
    if (current) await this.load(current.group);
    if (current !== this.current || step !== this.step) return; // another was chosen meanwhile, and is shown
    this.draw();
  }

  draw() {
    const top = this.main.querySelector(".list")?.scrollTop ?? 0;
    this.detail = this.as === "tokens" ? element("aside", { class: "detail", "aria-live": "polite", "aria-label": "Token" }) : null;
    const article = this.middle();
    render(this.main, element("div", { class: this.detail ? "play with-detail" : "play" }, this.side(), article, this.detail));
    const list = this.main.querySelector(".list"), chosen = list.querySelector("[aria-current]");
    list.scrollTop = top;
    if (chosen && (chosen.offsetTop < top || chosen.offsetTop + chosen.offsetHeight > top + list.clientHeight)) list.scrollTop = chosen.offsetTop - list.clientHeight / 2;
    if (this.seen > 0) bring(article.querySelectorAll(".turn")[this.seen]);
    else if (this.shown !== this.current && article.getBoundingClientRect().top < 0) article.scrollIntoView();
    [this.seen, this.shown] = [0, this.current];
    if (this.place.token) this.choose(this.place.token);
    else this.detail?.append(element("p", { class: "quiet" }, isTouched ? "Tap a sampled token to see its numbers." : "Hover over a sampled token, or press Tab and the arrow keys, to see its numbers."));
  }

  // From the conversation to the tokens of the same turn, and back.
  toggle() {
    if (!this.current) return;
    this.seen = [...this.main.querySelectorAll(".turn")].findIndex((turn) => turn.getBoundingClientRect().bottom > 80);
    this.visit({ episode: this.current.episode.id, as: this.as === "tokens" ? null : "tokens" });
  }

  // The episodes that are listed: every word that is looked for is in what names them.
  select() {
    const words = this.wanted.toLowerCase().split(/\s+/), key = ORDERS[this.order][1];
    this.listed = this.all.filter(({ episode, group }) => {
      const text = [taskName(group), group.task, JSON.stringify(group.options), outcomeOf(episode), episode.id, episode.error].join(" ").toLowerCase();
      return FILTERS[this.filter][1](episode, this.pass) && words.every((word) => text.includes(word));
    });
    if (key) this.listed.sort((a, b) => key(a.episode) - key(b.episode));
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

  chooser(label, choices, name) {
    const again = (value) => { this[name] = value; this.show(this.step, this.steps); };
    return chooser(label, Object.entries(choices).map(([value, choice]) => [value, choice.text ?? choice[0]]), String(this[name]), again);
  }

  // Which episode: of which step, of what kind, and those that there are. On a small screen a button unfolds it.
  side() {
    const fold = element("button", { type: "button", class: "fold", name: "fold", "aria-expanded": "false", onclick: () => {
      fold.setAttribute("aria-expanded", String(side.classList.toggle("open")));
    } }, `▾ ${this.step.name}: ${this.all.length} episodes`);
    const find = searchField("task, outcome, error…", this.wanted, (wanted) => {
      this.wanted = wanted;
      this.select();
      side.querySelector(".list").replaceWith(this.list());
    });
    const left = this.step.num_episodes - this.all.length;
    const side = element("div", { class: "side" }, fold, element("div", { class: "choices" },
      chooser("Step", this.steps.map((name) => [name, name]), this.step.name, (step) => this.visit({ step })),
      this.chooser("Show", FILTERS, "filter"), this.chooser("Order", ORDERS, "order"), find),
    this.list(),
    left > 0 ? element("p", { class: "quiet" }, `${left} of the step's ${this.step.num_episodes} episodes are not in this file; gspo-gym view shows all.`) : null);
    return side;
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
    const sum = known.reduce((total, { episode }) => total + episode.loss, 0);
    return element("p", { class: "quiet sum" },
      known.length ? ["The shares of the loss that are shown here sum to ", element("b", { id: "loss-sum" }, number(sum)), `; loss/total of the step is ${number(this.step.loss)}.`] : "What the learner saw of these tokens is not recorded (run.log_tokens_every_n_iters).");
  }

  list() {
    const items = [];
    let last = null;
    for (const each of this.listed) {
      // Evaluations play a task once: their groups of one have the environment's name once for all.
      const { episode, group } = each, isSibling = this.order === "played" && group.episodes.length > 1;
      const heading = isSibling ? taskName(group) : group.environment;
      if (this.order === "played" && (isSibling ? group !== last : heading !== last)) items.push(element("h3", {}, visible(heading, 80)));
      last = isSibling ? group : heading;
      const ended = `${outcomeOf(episode)}, ${episode.num_turns} turn${episode.num_turns === 1 ? "" : "s"}`;
      items.push(element("button", {
        type: "button", "aria-current": each === this.current ? "true" : null, "data-episode": episode.id, title: visible(nameIn(this.step, episode), 60),
        onclick: () => this.visit({ episode: episode.id }),
      }, element("span", {}, `${markOf(episode)} `, isSibling ? ended : [visible(taskName(group), 80), element("small", { class: "quiet" }, ended)]),
      element("span", { class: signOf(episode.return) }, signed(episode.return))));
    }
    if (!items.length) items.push(element("p", { class: "quiet" }, "No episode of this step is like that."));
    return element("nav", { class: "list", "aria-label": `${this.listed.length} episodes` }, items);
  }

  middle() {
    if (!this.current) return element("article", {}, "This step has no episodes.");
    const { episode, group } = this.current;
    const reasons = episode.judge?.outcome, isTokens = this.as === "tokens";
    const messages = isTokens ? null : turnMessages(episode);
    const passes = Object.fromEntries([...Array(this.step.num_passes).keys()].map((i) => [i, [`${i + 1} of ${this.step.num_passes}`]]));
    return element("article", { "aria-label": episode.id },
      this.head(episode, group),
      facts([
        ["return", signed(episode.return, 6)], ["error", episode.error], ["attempt", episode.attempt || null],
        ["share of the loss", episode.loss === null ? null : number(episode.loss, 6)], ["seconds", number(episode.seconds, 3)],
        ["judge", reasons ? `${number(reasons.total, 4)} ${reasons.summary}` : null], ["episode", episode.id],
      ], true),
      isTokens ? element("div", { class: "bar" }, this.chooser("Colour", COLOURS, "colour"),
        this.step.num_passes > 1 ? this.chooser("Pass", passes, "pass") : null, this.legend()) : null,
      isTokens ? this.sum() : null,
      isTokens || messages ? episode.turns.map((turn, i) => this.turn(episode, turn, i, isTokens ? this.strip(episode, turn, i) : messages[i].map((message) => this.message(message))))
        : episode.messages.map((message) => this.message(message)),
      reasons ? this.criteria(reasons) : null,
      group.episodes.length > 1 ? this.siblings(group) : null);
  }

  // The name of the episode, the way to those beside it, and to its tokens.
  head(episode, group) {
    const button = (name, text, onclick, more) => element("button", { type: "button", name, onclick, ...more }, text);
    const as = (name, text) => button(name, text, () => { if (this.as !== name) this.toggle(); }, { "aria-pressed": String(this.as === name) });
    return element("div", { class: "head" },
      element("h2", {}, `${visible(taskName(group), 120)} `, element("span", { class: signOf(episode.success === null ? 0 : episode.success - 0.5) }, `${markOf(episode)} ${outcomeOf(episode)}`)),
      element("div", { class: "tools" },
        button("previous", "‹", () => this.move(-1), { "aria-label": "previous episode" }),
        element("span", { class: "quiet" }, `${this.listed.indexOf(this.current) + 1 || "–"} of ${this.listed.length}`),
        button("next", "›", () => this.move(1), { "aria-label": "next episode" }),
        element("span", { class: "pair" }, as("conversation", "Conversation"), as("tokens", "Tokens"))));
  }

  criteria(review) {
    return table(["criterion", "score", "reason"], Object.entries(review.criteria).map(([name, { score, reason }]) => [name, number(score, 4), reason]), [1]);
  }

  // Siblings side by side: their answers, or their tokens with a bar where each leaves the last of the others.
  siblings(group) {
    const isTokens = this.as === "tokens";
    const rows = group.episodes.map((sibling) => {
      const strip = element("div", { class: isTokens ? "tokens" : "answers" });
      if (isTokens) for (const token of tokensOf(sibling).slice(0, 400)) strip.append(this.span(sibling, token.segment, token.position, token, "↵"));
      else strip.append(visible(sibling.messages.filter(({ role }) => role === "assistant").map(saidIn).join(" → "), 400));
      return [element("button", { type: "button", onclick: () => this.visit({ episode: sibling.id }) },
        `${markOf(sibling)} ${visible(sibling.id.split("/").at(-1), 30)}`), signed(sibling.return), strip];
    });
    return element("details", { class: "siblings", open: group.episodes.length <= 16 },
      element("summary", {}, `${group.episodes.length} episodes of this task${isTokens ? "; a bar marks where each leaves the others" : ""}`),
      table(["episode", "return", isTokens ? "sampled tokens" : "answers"], rows, [1]));
  }

  strip(episode, turn, i) {
    const segment = episode.segments[turn.segment];
    const sampled = new Map(tokensOf(episode).filter((token) => token.segment === turn.segment).map((token) => [token.position, token]));
    const strip = element("div", { class: "tokens" });
    for (let at = turn.observation[0]; at < turn.action[1]; at++) strip.append(this.span(episode, turn.segment, at, sampled.get(at)));
    // Tokens that the template appends after an action belong to no turn's spans before the next observation.
    if (i === episode.turns.length - 1) for (let at = turn.action[1]; at < segment.ids.length; at++) strip.append(this.span(episode, turn.segment, at));
    return strip;
  }

  turn(episode, turn, i, body) {
    const review = episode.judge?.events[i];
    return element("section", { class: "turn", "aria-label": `turn ${i}` },
      element("div", { class: "turn-head" }, element("b", {}, `turn ${i}`),
        element("span", {}, `reward ${signed(turn.reward)}`),
        Object.entries(turn.terms).map(([name, value]) => element("span", {}, `${visible(name, 40)} ${signed(value)}`)),
        turn.events.map((event) => element("span", { class: "positive" }, `⚑ ${visible(event, 60)}`)),
        turn.finish !== "stop" ? element("span", {}, `ended by ${turn.finish}`) : null,
        turn.parse !== "ok" ? element("span", { class: "negative" }, turn.parse) : null),
      body, review ? element("div", {}, `judge ${number(review.total, 4)} ${visible(review.summary)}`, this.criteria(review)) : null);
  }

  // Parts of a character are read together: the first of them has all of it, and the others say that they belong to it.
  textAt(episode, segment, position) {
    const { ids, texts } = episode.segments[segment];
    return (texts?.[position] ?? this.step.vocabulary[ids[position]] ?? `⟨${ids[position]}⟩`) || "‿";
  }

  span(episode, segment, position, token = null, newline = "↵\n") {
    const text = this.textAt(episode, segment, position);
    const leaves = episode.diverges && episode.diverges[0] === segment && episode.diverges[1] === position;
    const kind = token ? `sampled${token.fate && token.fate !== "trained" ? " masked" : ""}` : "environment";
    const shown = visible(text).replaceAll("\n", newline);
    // A space is marked by a dot in its place: the line between two tokens is none.
    const made = element("span", { class: `token ${kind}${leaves ? " leaves" : ""}` },
      token ? shown.split(/( )/).map((part) => (part === " " ? element("span", { class: "space" }, part) : part)) : shown);
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
    made.addEventListener("click", () => this.visit({ episode: episode.id, token: `${segment}:${position}` }));
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

  choose(place) {
    const span = [...this.main.querySelectorAll("article > .turn .token.sampled")].find((each) => each.dataset.place.endsWith(`|${place}`));
    if (!span) return;
    if (document.activeElement === document.body) span.focus({ preventScroll: true }); // else a colour is being chosen
    bring(span, { block: "nearest" });
    const [segment, position] = place.split(":").map(Number);
    const token = tokensOf(this.current.episode).find((each) => each.segment === segment && each.position === position);
    this.tell(this.current.episode, token, span);
  }

  message(message) {
    const { role, name, reasoning_content: reasoning } = message, said = saidIn(message);
    return element("div", { class: `message ${role}` }, element("span", { class: "role" }, name ? `${role} ${visible(name, 40)}` : role),
      visible(reasoning ? `(reasoning) ${reasoning}\n${said}` : said, 20000));
  }

  move(by) {
    const at = this.listed.indexOf(this.current);
    const next = this.listed[Math.min(this.listed.length - 1, Math.max(0, at + by))];
    if (next) this.visit({ episode: next.episode.id });
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
