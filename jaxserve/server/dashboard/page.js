// The page: asks for the state once a second while somebody looks, and shows it. Texts are set as text.

import { PoolMap, bars, calm, forgetColours, lines, sparkline } from "./charts.js";
import { Chat } from "./chat.js";

const $ = (id) => document.getElementById(id);
const MAX_STEPS = 512;
const KEY = "jaxserve-key";

let key = sessionStorage.getItem(KEY);
let steps = [];
let lastStep = 0;
let latest = null;
let paused = false;
let timer = 0;
let asking = false;
const map = new PoolMap($("map"));

// A browser that was asked for the key sends it by itself; `key` is one that was given to the page.
const send = (path, options = {}) => {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(new URL(path, location.origin + location.pathname), { ...options, headers });
};
const chat = new Chat(send);

const say = (id, text) => { const node = $(id); if (node.textContent !== text) node.textContent = text; };
const count = (n) => n.toLocaleString("en");
const short = (n) => (n >= 100 ? Math.round(n).toLocaleString("en") : n >= 10 ? n.toFixed(1) : n > 0 ? n.toFixed(2) : "0");
const percent = (part, whole) => (whole ? (100 * part) / whole : 0);
const plural = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;

// Asking

async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden || paused) return;
  asking = true;
  try {
    const reply = await send(`dashboard/state?since=${lastStep}`, { signal: AbortSignal.timeout(8000) });
    if (reply.status === 401) return needKey();
    if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
    take(await reply.json());
  } catch (error) {
    status("lost", "no answer");
    problem(`No answer from the server: ${error.message}`);
  } finally {
    asking = false;
  }
  timer = setTimeout(ask, calm.matches ? 2000 : 1000);
}

function needKey() {
  status("locked", "locked");
  say("key-problem", key ? "This key is not accepted." : "");
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem(KEY, key);
  $("key").value = "";
  ask();
});

// Showing

function status(state, text) {
  $("status").dataset.state = state;
  say("status-text", text);
}

function problem(text) {
  $("problem").hidden = !text;
  say("problem", text ?? "");
}

const STATUS = { ready: "ready", loading: "loading", shutting_down: "shutting down", engine_dead: "engine down" };

function take(state) {
  $("key-form").hidden = true;
  if ((state.last_step ?? 0) < lastStep) steps = []; // another engine
  lastStep = state.last_step ?? 0;
  const fields = state.step_fields ?? [];
  for (const values of state.steps ?? []) steps.push(Object.fromEntries(fields.map((name, i) => [name, values[i]])));
  steps = steps.slice(-MAX_STEPS);
  latest = state;
  status(state.status, state.is_stale ? "busy" : (STATUS[state.status] ?? state.status));
  problem(state.status === "engine_dead" ? state.problem : null);
  say("version", state.version);
  say("model", state.model);
  document.title = `${state.model} · jaxserve`;
  if (state.speaks) chat.serve({ model: state.model, speaks: state.speaks });
  show();
}

function show() {
  if (!latest) return;
  showRates(latest.seconds);
  if (!latest.stats) return;
  showPool(latest.pages, latest.stats);
  showSteps();
  showQueue(latest);
  showPrefixes(latest.prefixes);
}

const RATE_S = 5;

function showRates(seconds) {
  const column = (i) => seconds.map((second) => second[i]);
  const rate = (values) => values.slice(-RATE_S).reduce((a, b) => a + b, 0) / RATE_S;
  const mean = (values) => {
    const known = values.slice(-60).filter((v) => v !== null);
    return known.length ? short((1000 * known.reduce((a, b) => a + b, 0)) / known.length) : "–";
  };
  const [prompt, output, , ttft, itl] = [0, 1, 2, 3, 4].map(column);
  say("k-output", short(rate(output)));
  say("k-prompt", short(rate(prompt)));
  say("k-ttft", mean(ttft));
  say("k-itl", mean(itl));
  sparkline($("spark-output"), output, "decode");
  sparkline($("spark-prompt"), prompt, "chunk");
  sparkline($("spark-ttft"), ttft, "shared");
  sparkline($("spark-itl"), itl, "hit");
}

const width = (id, share) => { $(id).style.width = `${share}%`; };

function showPool(pages, stats) {
  if (!pages) return;
  const { free, cached, owned, shared } = pages.counts;
  for (const [name, n] of Object.entries({ free, cached, owned, shared })) say(`n-${name}`, count(n));
  const used = percent(owned + shared, pages.num_pages);
  say("k-kv", short(used));
  width("m-kv-shared", percent(shared, pages.num_pages));
  width("m-kv-owned", percent(owned, pages.num_pages));
  width("m-kv-cached", percent(cached, pages.num_pages));
  say("k-kv-note", `${count(owned + shared)} of ${count(pages.num_pages)} pages`);
  say("k-hits", short(100 * stats.hit_rate));
  width("m-hits", 100 * stats.hit_rate);
  say("k-hits-note", `${count(stats.num_hit_tokens)} of ${count(stats.num_queried_tokens)} tokens`);
  const host = pages.num_host_pages ? ` · host ${count(pages.num_used_host_pages)} of ${count(pages.num_host_pages)}` : "";
  const cell = pages.pages_per_cell > 1 ? ` · a cell is ${pages.pages_per_cell} pages` : "";
  say("pool-note", `${plural(pages.num_pages, "page")} of ${plural(pages.page_size, "token")}${cell}${host}`);
  $("map").setAttribute("aria-label", `Page pool: ${count(shared)} shared, ${count(owned)} owned, ${count(cached)} cached, ${count(free)} free of ${count(pages.num_pages)} pages`);
  map.show(Uint8Array.from(atob(pages.cells), (c) => c.charCodeAt(0)));
}

$("map").addEventListener("pointermove", (event) => {
  const found = map.at(event);
  const n = latest?.pages?.pages_per_cell ?? 1;
  if (!found) return say("map-cell", "");
  const first = found.index * n + 1;
  const last = Math.min(first + n - 1, latest.pages.num_pages);
  say("map-cell", n === 1 ? `page ${first}: ${found.state}` : `pages ${first} to ${last}: mostly ${found.state}`);
});
$("map").addEventListener("pointerleave", () => say("map-cell", ""));

function showSteps() {
  bars($("batch"), steps);
  const last = steps.at(-1);
  if (!last) return say("steps-note", "no step yet");
  const text = `step ${count(last.number)}: ${last.num_decode_tokens} decode + ${last.num_chunk_tokens} prompt + ${last.num_padding_tokens} padding, ${short(1000 * last.seconds)} ms`;
  say("steps-note", text);
  $("batch").setAttribute("aria-label", `Tokens of the last ${steps.length} steps. Last ${text}`);
}

function showQueue({ stats, num_waiting_tokens: tokens, requests, num_refused: refused }) {
  say("q-running", count(stats.num_running));
  say("q-slots", `of ${count(stats.max_num_seqs)}`);
  say("q-waiting", count(stats.num_waiting));
  say("q-tokens", stats.num_waiting ? plural(tokens, "token") : "");
  say("q-preempted", count(stats.num_preemptions));
  const { stop = 0, length = 0, abort = 0, error = 0 } = requests;
  say("q-done", count(stop + length));
  const bad = [[abort, "aborted"], [error, "failed"], [refused, "refused"]].filter(([n]) => n);
  say("q-bad", bad.map(([n, what]) => `${count(n)} ${what}`).join(", "));
  say("queue-note", stats.num_held ? `${count(stats.num_held)} held` : "");
  const shown = steps.slice(-160);
  lines($("queue"), [
    { values: shown.map((s) => s.num_running), colour: "owned", fill: true },
    { values: shown.map((s) => s.num_waiting), colour: "chunk", fill: false },
  ]);
  $("queue").setAttribute("aria-label", `${stats.num_running} sequences running, ${stats.num_waiting} waiting`);
}

// [prefix, depth] with each below what it goes on from; those side by side stay in their order.
function inTreeOrder(prefixes) {
  const below = new Map();
  prefixes.forEach(({ parent }, i) => below.set(parent, [...(below.get(parent) ?? []), i]));
  const walk = (parent, depth) =>
    (below.get(parent) ?? []).flatMap((i) => [[prefixes[i], depth], ...walk(i, depth + 1)]);
  return walk(null, 0);
}

function showPrefixes(prefixes) {
  say("prefix-note", prefixes.length ? "most hits first" : "");
  if (!prefixes.length) return;
  const rows = inTreeOrder(prefixes).map(([prefix, depth]) => {
    const row = document.createElement("tr");
    if (prefix.num_users) row.className = "live";
    const cell = (text, kind) => {
      const node = document.createElement("td");
      node.className = kind;
      node.textContent = text;
      row.append(node);
      return node;
    };
    const text = prefix.is_private ? "private" : (prefix.text ?? "tokens");
    const shown = text.replaceAll("\n", "↵") + (prefix.is_cut && !prefix.is_private ? "…" : "");
    const first = cell("", `text d${Math.min(4, depth)}${prefix.is_private ? " private" : ""}`);
    const lines = document.createElement("span");
    lines.textContent = shown;
    first.append(lines);
    first.title = `${shown}\n${plural(prefix.num_pages, "page")}, ${plural(prefix.num_own_tokens, "token")} of its own`;
    cell(count(prefix.num_hits), "n");
    cell(count(prefix.num_users), "n");
    cell(count(prefix.num_tokens), "n");
    return row;
  });
  $("prefixes").replaceChildren(...rows);
}

// When to ask and to draw again

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say("pause", paused ? "Resume" : "Pause");
  if (paused) status("paused", "paused");
  ask();
});
document.addEventListener("visibilitychange", ask);
const redraw = () => { forgetColours(); show(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(() => requestAnimationFrame(redraw)).observe(document.querySelector("main"));
ask();
