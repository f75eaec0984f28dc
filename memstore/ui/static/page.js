// The live page. Everything that a store says becomes text or an attribute's number, and never HTML.
"use strict";

const LIMIT = matchMedia("(max-width: 40rem)").matches ? 25 : 100; // keys
const STEPS = 8;
const KEPT = 60; // seconds of the curve
const LOST = 100; // that a cluster tells at most
const $ = (id) => document.getElementById(id);

let source = null;
let prefix = "";
let trail = [""]; // the key before each page, up to this one
let lastKey = "";
let offset = 0; // the server's clock beside ours, in seconds
let versions = new Map();
let curve = [];
let holders = []; // processes, of the last state

// --- Elements --------------------------------------------------------------------------------------------------------

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.className = value;
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function cell(label, content, kind = "") {
  const td = make("td", { class: kind }, content);
  if (label) td.dataset.label = label;
  return td;
}

const number = (label, text) => cell(label, text, "n");

function fill(value, text) {
  const bar = make("progress", { max: 1, value: Math.min(Math.max(value, 0), 1) });
  bar.setAttribute("aria-label", text);
  return make("span", { title: text }, bar);
}

// --- Numbers as people read them -------------------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function size(bytes) {
  let unit = 0;
  while (bytes >= 1023.95 && unit < UNITS.length - 1) { bytes /= 1024; unit += 1; }
  return unit ? `${bytes.toFixed(1)} ${UNITS[unit]}` : `${Math.round(bytes)} B`;
}

function age(seconds) {
  seconds = Math.max(seconds, 0);
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  if (seconds < 3570) return `${Math.round(seconds / 60)} min`;
  if (seconds < 84600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const count = (value) => value.toLocaleString("en-US");
const since = (created) => age(Date.now() / 1000 + offset - created);

function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return value >= 100 ? count(Math.round(value)) : value.toFixed(value >= 10 ? 0 : 1);
}

const shown = (key) => key.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069]/g,
  (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);

function keyButton(key) {
  const button = make("button", { type: "button", class: "link" }, shown(key));
  button.dataset.key = key;
  return button;
}

// --- The parts of the page -------------------------------------------------------------------------------------------

function drawTiles(state) {
  const stats = state.stats;
  curve.push(state.puts_rate ?? 0);
  curve = curve.slice(-KEPT);
  const capacity = stats.capacity === null ? "no capacity set" : `of ${size(stats.capacity)}`;
  const tiles = [
    ["keys", count(stats.keys), `${count(state.versions)} versions so far`],
    ["puts a second", rate(state.puts_rate), spark(curve)],
    ["gets a second", rate(state.gets_rate), state.gets_rate === null ? "gets leave no trace: not counted" : "of the process that serves this page"],
    ["live", size(stats.live_bytes), capacity],
    ["replaced, kept for puts", size(stats.reusable_bytes), null],
    ["replaced, still held", size(stats.pinned_bytes), stats.pinned_by.length ? `by pid ${stats.pinned_by.join(", ")}` : null],
    ["catalog", size(stats.catalog_bytes), null],
    ["processes", count(state.holders.filter((one) => one.is_open).length), "have it open"],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, more]) => {
    const below = typeof more === "string" ? make("small", {}, more) : more;
    return make("div", {}, make("dt", {}, name), make("dd", { "data-tile": name }, value, below));
  }));
}

function spark(values) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 10`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const most = Math.max(...values, 1e-9), first = KEPT - values.length;
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", values.map((value, at) => `${first + at},${(9.5 - 9 * value / most).toFixed(2)}`).join(" "));
  svg.append(line);
  return svg;
}

function drawKeys(state) {
  const body = $("key-rows");
  const before = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const rows = state.keys.map((one) => {
    const row = before.get(one.key) ?? make("tr", {}, cell("", keyButton(one.key), "key"));
    row.dataset.key = one.key;
    const seen = versions.get(one.key);
    if (row.dataset.version !== undefined && row.dataset.version !== String(one.version)) {
      row.classList.remove("changed");
      void row.offsetWidth; // so that the animation begins anew
      row.classList.add("changed");
    }
    row.dataset.version = one.version;
    row.dataset.created = one.created;
    while (row.cells.length > 1) row.deleteCell(-1);
    const where = one.kind === one.type || one.kind === "segment" ? null : make("span", { class: "kind" }, `, ${one.kind}`);
    row.append(
      cell("", make("span", {}, one.type, where), "type"), number("size", size(one.nbytes)), number("version", count(one.version)),
      number("age", since(one.created)), number("changes/s", one.rate ? `≥ ${rate(one.rate)}` : rate(one.rate)));
    if (seen !== one.version) versions.set(one.key, one.version);
    return row;
  });
  if (rows.length !== body.rows.length || rows.some((row, at) => body.rows[at] !== row)) replaceKeeping(body, rows);
  versions = new Map(state.keys.map((one) => [one.key, one.version]));
  lastKey = state.keys.length ? state.keys[state.keys.length - 1].key : "";
  $("no-keys").hidden = rows.length > 0;
  $("no-keys").textContent = prefix ? `No key starts with ${shown(prefix)}.` : "The store has no keys yet.";
  $("next").disabled = !state.more;
  $("back").disabled = $("first").disabled = trail.length < 2;
  const from = (trail.length - 1) * LIMIT + 1;
  const all = prefix ? "" : ` of ${count(state.stats.keys)}`;
  $("place").textContent = rows.length ? `${count(from)} to ${count(from + rows.length - 1)}${all}` : "";
}

// Rows that move lose the focus: it is given back.
function replaceKeeping(body, rows) {
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  body.replaceChildren(...rows);
  if (focused !== undefined) rows.find((row) => row.dataset.key === focused)?.querySelector("button")?.focus();
}

function drawSection(id, rows) {
  const section = $(id), body = section.querySelector("tbody");
  section.hidden = rows.length === 0;
  replaceKeeping(body, rows);
}

function draw(state) {
  offset = state.at - Date.now() / 1000;
  $("root").textContent = state.root;
  document.title = `${state.root} – memstore`;
  const isGone = state.gone !== undefined;
  $("gone").hidden = !isGone;
  $("main").classList.toggle("stale", isGone);
  status(isGone ? "gone" : "live", isGone ? "no store" : "live");
  if (isGone) {
    $("gone").textContent = `${state.gone}. This page goes on when there is a store again.`;
    return;
  }
  $("troubles").hidden = state.troubles.length === 0;
  $("troubles").replaceChildren(...state.troubles.map((text) => make("li", {}, text)));
  drawTiles(state);
  drawKeys(state);
  drawSection("rows", state.rows.map((one) => {
    const rows = one.rows ?? 0, said = `${count(rows)} of ${count(one.capacity)} rows`;
    const row = make("tr", {}, cell("", keyButton(one.key), "key"), cell("", fill(rows / one.capacity, said), "wide"),
      number("rows", one.rows === null ? "on another host" : said.replace(" rows", "")),
      number("added/s", rate(one.added_rate)), number("sampled/s", rate(one.sampled_rate)));
    row.dataset.key = one.key;
    return row;
  }));
  drawSection("steps", [...state.steps].reverse().slice(0, STEPS).map((one) => make("tr", {},
    cell("", make("span", {}, `step ${count(one.step)}`, make("small", {}, one.root))),
    cell("", make("span", { class: one.state === "whole" ? "good" : "" }, one.state)),
    cell("", one.part === null ? "–" : fill(one.part, `${Math.round(one.part * 100)} %`), "wide"),
    number("size", size(one.nbytes)), number("age", one.created === null ? "–" : since(one.created)))));
  drawSection("hosts", state.hosts.map((one) => make("tr", {},
    cell("", make("span", {}, one.name || one.address, make("small", { class: "mono" }, one.address))),
    cell("", make("span", { class: one.alive ? "good" : "bad" }, one.alive ? "answers" : "silent",
      one.trouble || one.draining ? make("small", {}, one.trouble || one.draining) : null), "wide"),
    number("keys", one.alive ? count(one.keys) : "–"), number("live", one.alive ? size(one.live_bytes) : "–"),
    number("sent", one.alive ? traffic(one.sent, one.sent_rate) : "–"),
    number("received", one.alive ? traffic(one.received, one.received_rate) : "–"))));
  const lost = Object.entries(state.lost);
  drawSection("lost", lost.map(([name, host]) => make("tr", {},
    cell("", shown(name), "key"), cell("lost with", make("span", { class: "mono" }, host)))));
  $("lost-limit").hidden = lost.length < LOST;
  holders = state.holders;
  drawSection("holders", state.holders.map((one) => make("tr", {},
    cell("", make("span", {}, `pid ${one.pid}`, make("small", { class: "mono" }, cut(one.command, 160)))),
    cell("", named(one.keys), "wide"), number("held", one.keys.length ? size(one.nbytes) : "–"),
    number("replaced", one.replaced.length ? size(one.replaced_nbytes) : "–"))));
  drawSection("pending", state.pending.map((one) => make("tr", {},
    cell("", shown(one.key), "key"), cell("attempt", one.attempt), cell("ranks", `${one.ranks.length} of ${one.world_size}`),
    number("size", size(one.nbytes)), number("expires in", age(one.expires - state.at)))));
  drawSection("quotas", state.quotas.map((one) => make("tr", {},
    cell("", shown(one.prefix) || "(all keys)", "key"),
    cell("", fill(one.quota ? one.used / one.quota : 0, `${size(one.used)} of ${size(one.quota)}`), "wide"),
    number("bytes", `${size(one.used)} of ${size(one.quota)}`))));
}

const cut = (text, most) => text.length > most ? `${text.slice(0, most)}…` : text;

function traffic(bytes, perSecond) {
  return make("span", {}, size(bytes), make("small", {}, perSecond ? `${size(perSecond)}/s` : "idle"));
}

function named(keys) {
  const more = keys.length - 3;
  return keys.length ? keys.slice(0, 3).map(shown).join(", ") + (more > 0 ? ` and ${count(more)} more` : "") : "nothing";
}

function status(state, text) {
  const place = $("status");
  if (place.dataset.state !== state) place.textContent = text;
  place.dataset.state = state;
}

// --- One entry -------------------------------------------------------------------------------------------------------

async function openEntry(key) {
  $("entry-title").textContent = shown(key);
  $("entry-body").replaceChildren(make("p", { class: "empty" }, "reading …"));
  if (!$("entry").open) $("entry").showModal();
  let found;
  try {
    found = await (await fetch(`/entry?${new URLSearchParams({ key })}`)).json();
  } catch (error) {
    found = { error: String(error) };
  }
  if ($("entry-title").textContent !== shown(key)) return;
  $("entry-body").replaceChildren(...(found.error ? [make("p", { class: "notice" }, found.error)] : described(found)));
}

function described(found) {
  const owner = found.owner ? `, owned by ${found.owner}` : "";
  const head = make("p", {}, `version ${count(found.version)}: ${found.structure}, ${found.kind}, ${size(found.nbytes)}, `
    + `${since(found.created)} old${owner}`);
  const pids = (part) => holders.filter((one) => one[part].includes(found.key)).map((one) => `pid ${one.pid}`).join(", ");
  const [now, before] = [pids("keys"), pids("replaced")];
  const held = [now && `held by ${now}`, before && `replaced versions held by ${before}`].filter(Boolean).join("; ");
  const rows = found.leaves.map((leaf) => make("tr", {},
    cell("", leaf.name || "(the value)", "key"), cell("", leaf.dtype), cell("", `[${leaf.shape.join(", ")}]`),
    number("size", size(leaf.nbytes))));
  const heads = ["leaf", "dtype", "shape", "size"].map((name, at) => make("th", { scope: "col", class: at === 3 ? "n" : "" }, name));
  const table = rows.length
    ? make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows))
    : make("p", { class: "empty" }, "It has no tensors.");
  const maps = found.leaves.filter((leaf) => leaf.shards.length).flatMap((leaf) => [
    make("h3", {}, `${leaf.name || "(the value)"} [${leaf.shape.join(", ")}]: ranks`), shardMap(leaf)]);
  const more = found.more ? make("p", { class: "empty" }, `and ${count(found.more)} leaves more`) : null;
  return [head, ...(held ? [make("p", { class: "holders" }, held)] : []), table, ...(more ? [more] : []), ...maps];
}

// The first two dimensions of a tensor, with a rectangle for each part; a vector is one row.
function shardMap(leaf) {
  const space = "http://www.w3.org/2000/svg", [width, height] = [640, leaf.shape.length > 1 ? 240 : 60];
  const tall = leaf.shape.length > 1 ? leaf.shape[0] : 1, wide = leaf.shape[leaf.shape.length > 1 ? 1 : 0] ?? 1;
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "map");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", leaf.shards.map((one) =>
    `rank ${one.rank}: ${one.offsets.map((start, at) => `${start} to ${start + one.shape[at]}`).join(", ")}`).join("; "));
  for (const one of leaf.shards) {
    const [top, left] = one.offsets.length > 1 ? one.offsets : [0, one.offsets[0] ?? 0];
    const [rows, columns] = one.shape.length > 1 ? one.shape : [1, one.shape[0] ?? 1];
    const [x, y] = [width * left / wide, height * top / tall], [w, h] = [width * columns / wide, height * rows / tall];
    const box = document.createElementNS(space, "rect");
    const place = { x, y, width: w, height: h, fill: `hsl(${(one.rank * 137) % 360} 60% 72%)`, stroke: "#1b1f24" };
    for (const [name, value] of Object.entries(place)) box.setAttribute(name, value);
    const title = document.createElementNS(space, "title");
    title.textContent = `rank ${one.rank}, from [${one.offsets.join(", ")}], shape [${one.shape.join(", ")}]`;
    box.append(title);
    svg.append(box);
    if (w > 22 && h > 14) {
      const label = document.createElementNS(space, "text");
      label.setAttribute("x", x + w / 2);
      label.setAttribute("y", y + h / 2);
      label.textContent = one.rank;
      svg.append(label);
    }
  }
  return svg;
}

// --- The stream ------------------------------------------------------------------------------------------------------

function listen() {
  source?.close();
  source = new EventSource(`/events?${new URLSearchParams({ prefix, after: trail[trail.length - 1], limit: LIMIT })}`);
  source.onmessage = (event) => draw(JSON.parse(event.data));
  source.onerror = () => {
    status("lost", "connection lost");
    $("main").classList.add("stale");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

function turn(to) {
  trail = to;
  listen();
}

function watch() {
  let timer = 0;
  $("prefix").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { prefix = $("prefix").value; turn([""]); }, 250);
  });
  $("filter").addEventListener("submit", (event) => event.preventDefault());
  $("next").addEventListener("click", () => turn([...trail, lastKey]));
  $("back").addEventListener("click", () => turn(trail.slice(0, -1)));
  $("first").addEventListener("click", () => turn([""]));
  $("close").addEventListener("click", () => $("entry").close());
  document.addEventListener("click", (event) => {
    const key = event.target.closest?.("button.link")?.dataset.key;
    if (key !== undefined) openEntry(key);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input, dialog")) {
      event.preventDefault();
      $("prefix").focus();
    }
  });
  listen();
}

watch();
