"use strict";
// The chat: conversations live in this browser alone.

const byId = (id) => document.getElementById(id);

// A new element with some attributes (a function handles an event) and children.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const STORE = "graphdecode.conversations";
const CURRENT = "graphdecode.current"; // the conversation that is shown, in this tab
const CONTROLS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "system"];
const ENDS = { // of answers that did not end by themselves
  length: "Cut: the answer has reached its limit (Longest answer, under Settings), or the model's length.",
  interrupted: "Interrupted: the page was closed or loaded again.",
};

const state = { conversations: [], current: 0, running: null, answering: null, model: null, hasTemplate: true };

function load() {
  try {
    state.conversations = JSON.parse(localStorage.getItem(STORE)) || [];
  } catch {
    state.conversations = [];
  }
  if (!state.conversations.length) state.conversations.push(blank());
  state.current = Math.min(Number(sessionStorage.getItem(CURRENT)) || 0, state.conversations.length - 1);
  byId("key").value = sessionStorage.getItem("graphdecode.key") || "";
}

function save() {
  const { of, turn } = state.answering || {};
  const turnsOf = (c) => (c === of && isSaid(turn) ? [...c.turns, turn] : c.turns);
  const plain = state.conversations.map((c) => ({ title: c.title, turns: turnsOf(c).map(stored) }));
  try {
    localStorage.setItem(STORE, JSON.stringify(plain));
  } catch {
    complain("This browser keeps no more conversations: delete some.");
  }
}

const said = ({ role, content, reasoning_content }) => ({ role, content, ...(reasoning_content ? { reasoning_content } : {}) });
const isSaid = (turn) => Boolean(turn.content || turn.reasoning_content);
const stored = (turn) => ({ ...said(turn), ...(turn.end ? { end: turn.end } : {}) });
const blank = () => ({ title: "", turns: [] });
const conversation = () => state.conversations[state.current];

function complain(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

function headers() {
  const key = byId("key").value;
  sessionStorage.setItem("graphdecode.key", key);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function showList() {
  byId("list").replaceChildren(...state.conversations.map(({ title }, index) => {
    const open = { type: "button", "aria-current": index === state.current, onclick: () => select(index) };
    const remove = { type: "button", "aria-label": `Delete ${title || "conversation"}`, onclick: () => forget(index) };
    return make("li", {}, make("button", open, title || "New conversation"), make("button", remove, "×"));
  }));
}

function select(index) {
  stop();
  state.current = index;
  complain("");
  show();
  byId("text").focus();
}

function forget(index) {
  stop();
  state.conversations.splice(index, 1);
  if (!state.conversations.length) state.conversations.push(blank());
  state.current = Math.min(state.current, state.conversations.length - 1);
  save();
  show();
}

function show() {
  sessionStorage.setItem(CURRENT, state.current);
  showList();
  byId("turns").replaceChildren(...conversation().turns.map((turn) => shownTurn(turn).section));
  scrollDown(true);
}

function shownTurn(turn) {
  const isUser = turn.role === "user";
  const text = isUser ? make("p", {}, turn.content) : make("div", {}, ...written(turn));
  const who = make("h4", {}, isUser ? "You" : state.model || "Model");
  return { section: make("section", { class: `turn ${turn.role}` }, who, text), text };
}

const written = (turn) => [...thought(turn), ...answered(turn), ...(ENDS[turn.end] ? [make("small", {}, ENDS[turn.end])] : [])];

// The reasoning before an answer, which is open until the answer begins.
function thought({ reasoning_content: text, content }) {
  if (!text) return [];
  const details = make("details", { class: "thought", ...(content ? {} : { open: "" }) });
  details.append(make("summary", {}, "Thinking"), make("p", {}, text.trim()));
  return [details];
}

// An answer as elements. Texts in it are of its tokens, so that each of these can tell its odds.
function answered(turn) {
  const tokens = turn.tokens || [{ text: turn.content }];
  let index = 0, begin = 0; // the token at hand, and where it begins
  const leaf = (from, to) => {
    const spans = [];
    while (index < tokens.length && begin < to) {
      const { text, odds } = tokens[index], end = begin + text.length;
      if (end > from) spans.push(shownToken({ text: turn.content.slice(Math.max(from, begin), Math.min(to, end)), odds }));
      if (end > to) break;
      begin = end;
      index++;
    }
    return spans;
  };
  const built = ([tag, attributes, children]) => {
    if (typeof tag === "number") return leaf(tag, attributes);
    return [make(tag, attributes, ...children.flatMap(built))];
  };
  const whole = [["p", {}, [[0, turn.content.length]]]]; // what is no chat is no Markdown
  return (state.hasTemplate ? markdown(turn.content) : whole).flatMap(built);
}

function shownToken({ text, odds }) {
  const span = make("span", odds && odds.length ? { class: "token" } : {}, text);
  if (odds && odds.length) span.odds = odds;
  return span;
}

function scrollDown(always) {
  const turns = byId("turns");
  if (always || turns.scrollHeight - turns.scrollTop - turns.clientHeight < 160) turns.scrollTop = turns.scrollHeight;
}

function settings() {
  const asked = { model: state.model, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    const value = byId(name).valueAsNumber;
    if (!Number.isNaN(value)) asked[name] = value;
  }
  return asked;
}

function request() {
  const turns = conversation().turns.map(said);
  if (!state.hasTemplate) {
    return ["v1/completions", { ...settings(), prompt: turns[turns.length - 1].content, logprobs: 5 }];
  }
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  return ["v1/chat/completions", { ...settings(), messages, logprobs: true, top_logprobs: 5 }];
}

// One choice of either endpoint as tokens with their likeliest alternatives.
function tokensOf(choice) {
  const text = choice.delta ? choice.delta.content || "" : choice.text || "";
  const { content, tokens, top_logprobs: top } = choice.logprobs || {};
  const chat = (content || []).map((t) => ({ text: t.token, odds: t.top_logprobs.map((o) => [o.token, o.logprob]) }));
  const plain = (tokens || []).map((token, i) => ({ text: token, odds: Object.entries(top[i] || {}) }));
  for (const all of [chat, chat.slice(0, -1), plain, plain.slice(0, -1)]) { // the last may end the answer, and is no text
    if (all.length && all.map((token) => token.text).join("") === text) return all;
  }
  return text ? [{ text, odds: chat.length ? chat[0].odds : null }] : [];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  const current = conversation();
  current.title = current.title || text.slice(0, 60);
  current.turns.push({ role: "user", content: text });
  save();
  show();
  const [path, body] = request();
  const turn = { role: "assistant", content: "", tokens: [] };
  const shown = shownTurn(turn);
  byId("turns").append(shown.section);
  shown.section.setAttribute("aria-busy", "true");
  let frame = 0;
  const draw = () => {
    frame = 0;
    shown.text.replaceChildren(...written(turn));
    scrollDown(false);
  };
  state.running = new AbortController();
  state.answering = { of: current, turn };
  byId("send").disabled = true;
  byId("stop").disabled = false;
  complain("");
  const began = performance.now();
  let first = 0;
  let refused = false;
  try {
    const post = () => fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: state.running.signal });
    let response = await post();
    if (response.status === 400 && body.max_tokens) { // perhaps less fits beside what was said than an answer may have
      const told = await response.clone().json().catch(() => null);
      if (told?.error?.code === "context_length_exceeded" && told.error.param === "max_tokens") {
        body.max_tokens = null;
        response = await post();
      }
    }
    if (!response.ok) throw new Error(await reason(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const { delta } of event.choices) {
        if (!delta?.reasoning_content) continue;
        first = first || performance.now();
        turn.reasoning_content = (turn.reasoning_content || "") + delta.reasoning_content;
      }
      for (const token of event.choices.flatMap(tokensOf)) {
        first = first || performance.now();
        turn.tokens.push(token);
        turn.content += token.text;
      }
      if (event.choices.some((choice) => choice.finish_reason === "length")) turn.end = "length";
      frame = frame || requestAnimationFrame(draw);
      if (event.usage) tellSpeed(event.usage.completion_tokens, first - began, performance.now() - first);
    }
  } catch (error) {
    refused = error.name !== "AbortError" && !isSaid(turn);
    if (error.name !== "AbortError") complain(error.message);
  } finally {
    state.running = state.answering = null;
    if (turn.end === "length") turn.content = turn.content.replace(/\ufffd+$/, ""); // a part of a character
    cancelAnimationFrame(frame);
    draw();
    shown.section.removeAttribute("aria-busy");
    byId("send").disabled = false;
    byId("stop").disabled = true;
    if (isSaid(turn)) current.turns.push(turn);
    else shown.section.remove();
    if (refused) takeBack(current, text);
    save();
    byId("text").focus();
  }
}

// A message that was refused is not said: it is in the input again, to be edited.
function takeBack(current, text) {
  current.turns.pop();
  if (!current.turns.length) current.title = "";
  byId("text").value = byId("text").value || text;
  show();
}

async function reason(response) {
  try {
    const { error } = await response.json();
    return response.status === 401 ? `${error.message} (set it under Settings)` : error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

function tellSpeed(tokens, firstMs, restMs) {
  const speed = tokens > 1 ? `, ${((tokens - 1) / (restMs / 1000)).toFixed(1)} tokens/s` : "";
  byId("speed").textContent = `${tokens} tokens, first after ${Math.round(firstMs)} ms${speed}`;
}

function stop() {
  if (state.running) state.running.abort();
}

function showOdds(event) {
  document.getElementById("odds")?.remove();
  const odds = event.target.odds;
  if (!odds) return;
  const likeliest = [...odds].sort((a, b) => b[1] - a[1]);
  const lines = likeliest.map(([token, logprob]) => `${(100 * Math.exp(logprob)).toFixed(1).padStart(5)} %  ${JSON.stringify(token)}`);
  const box = make("div", { id: "odds" }, lines.join("\n"));
  document.body.append(box);
  const at = event.target.getBoundingClientRect();
  box.style.left = `${Math.min(at.left, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${at.bottom + box.offsetHeight < innerHeight ? at.bottom : at.top - box.offsetHeight}px`;
}

byId("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || state.running) return;
  byId("text").value = "";
  ask(text);
};
byId("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
};
addEventListener("pagehide", () => {
  if (!state.answering) return;
  state.answering.turn.end = "interrupted";
  save();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
byId("stop").onclick = stop;
byId("new").onclick = () => select(state.conversations.push(blank()) - 1);
byId("turns").addEventListener("pointerover", showOdds);
byId("turns").addEventListener("pointerout", () => document.getElementById("odds")?.remove());
for (const [button, panel] of [["toggle-list", "conversations"], ["toggle-machine", "machine"]]) {
  byId(button).onclick = () => {
    const shown = getComputedStyle(byId(panel)).display !== "none";
    byId(panel).classList.toggle("open", !shown);
    byId(panel).classList.toggle("closed", shown);
    byId(button).setAttribute("aria-expanded", String(!shown));
  };
}
for (const name of CONTROLS) {
  const kept = localStorage.getItem(`graphdecode.${name}`);
  if (kept !== null) byId(name).value = kept;
  byId(name).addEventListener("change", () => localStorage.setItem(`graphdecode.${name}`, byId(name).value));
}

async function begin() {
  load();
  try {
    const live = await (await fetch("live")).json();
    state.model = live.model;
    state.hasTemplate = live.has_chat_template;
    for (const [name, value] of Object.entries(live.sampling)) byId(name).placeholder = `${value} (the model's)`;
    byId("model").textContent = live.model + (live.has_chat_template ? "" : " (no chat template: each message is a prompt)");
  } catch {
    complain("The server does not answer.");
  }
  show();
}
begin();
