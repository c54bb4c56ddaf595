// The state, and what changes it.
const several = data.names.length > 1;
const state = {
  head: 0, grid: several, query: Math.min(1, rows - 1), key: 0, held: false, colours: data.colours,
};

let scheduled = false;
function show() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    byId("map").hidden = state.grid;
    byId("grid").hidden = !state.grid;
    const wanted = state.grid ? "all" : String(state.head);
    for (const input of document.querySelectorAll("#heads input")) input.checked = input.value === wanted;
    if (state.grid) drawGrid(state); else drawMap(state);
    drawBar(state);
    drawRow(state);
    drawStrips(state);
    document.body.dataset.shown = [wanted, state.query, state.key].join(" ");  // read by tests
  });
}

function change(changes) {
  Object.assign(state, changes);
  show();
}

const describe = (head, query, key) =>
  `${nameOf(head) ? nameOf(head) + ", " : ""}query ${cellText(data.queries, query)}, key ` +
  `${cellText(data.keys, key)}: ${numberText(valuesOf(head)[query * columns + key])}`;

// --- heads ---

function addHeads() {
  const add = (value, text, name) => {
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, {type: "radio", name: "head", value});
    input.setAttribute("aria-label", name);
    const face = document.createElement("span");
    face.textContent = text;
    face.title = name;
    label.append(input, face);
    byId("heads").append(label);
  };
  for (const part of [byId("heads"), ...document.querySelectorAll(".several")]) part.hidden = !several;
  if (!several) return;
  add("all", "All heads", "all heads side by side");
  add(String(MEAN), "Mean", nameOf(MEAN));
  data.names.forEach((name, head) => add(String(head), name.replace(/^head (?=\d+$)/, ""), name));
  byId("heads").addEventListener("change", ({target}) =>
    change(target.value === "all" ? {grid: true} : {grid: false, head: Number(target.value)}));
  for (let head = 0; head < MEAN; ++head) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.head = head;
    button.append(document.createElement("canvas"), document.createElement("span"));
    button.lastChild.textContent = nameOf(head);
    button.addEventListener("click", () => {
      change({grid: false, head});
      byId("map").focus();
    });
    button.addEventListener("pointermove", (event) => {
      const box = button.firstChild.getBoundingClientRect();
      const query = Math.floor((event.clientY - box.top) / box.height * rows);
      const key = Math.floor((event.clientX - box.left) / box.width * columns);
      if (query < 0 || query >= rows || key < 0 || key >= columns) return hideTip();
      showTip(event, head, state.held ? state.query : query, key);
      if (!state.held) change({query, key});
    });
    button.addEventListener("pointerleave", hideTip);
    byId("grid").append(button);
  }
  byId("grid").style.setProperty("--small", MEAN > 16 ? "150px" : "210px");
}

// --- the map ---

function cellAt(event) {
  const box = mapCanvas.getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left - layout.left) / layout.cell.x);
  const y = Math.floor((event.clientY - box.top - layout.top) / layout.cell.y);
  if (y < 0 || y >= rows || x >= columns) return null;
  return {query: y, key: x < 0 ? null : x};  // left of the map stands the query's label
}

function showTip(event, head, query, key) {
  const tip = byId("tip");
  const value = document.createElement("b");
  value.textContent = numberText(valuesOf(head)[query * columns + key]);
  tip.replaceChildren(`${cellText(data.queries, query)} \u2192 ${cellText(data.keys, key)}  `, value);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - box.height - 8)}px`;
}
function hideTip() { byId("tip").hidden = true; }

function addMap() {
  const map = byId("map");
  map.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (cell === null) return hideTip();
    const query = state.held ? state.query : cell.query;
    const key = cell.key === null ? state.key : cell.key;
    if (cell.key === null) hideTip(); else showTip(event, state.head, query, key);
    change({query, key});
  });
  map.addEventListener("pointerleave", hideTip);
  map.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell === null) return;
    change(state.held && cell.query === state.query ? {held: false} : {held: true, query: cell.query});
  });
}

// --- tokens ---

function addStrip(title, axis, roles) {
  const heading = document.createElement("h3");
  heading.textContent = title;
  const strip = document.createElement("div");
  strip.className = "strip";
  for (let cell = 0; cell < axis.cells; ++cell) {
    const {index, token} = cellName(axis, cell);
    const face = document.createElement("span");
    face.textContent = token === "" ? index : token;
    face.title = cellText(axis, cell);
    for (const role of roles) face.dataset[role] = cell;
    strip.append(face);
  }
  const point = ({target}, changes) => {
    const {query, key} = target.dataset;
    if (query !== undefined) change({query: Number(query), ...changes});
    else if (key !== undefined) change({key: Number(key)});
  };
  strip.addEventListener("pointerover", (event) => { if (!state.held) point(event, {}); });
  strip.addEventListener("click", (event) => point(event, {held: true}));
  byId("strips").append(heading, strip);
}

// --- the keyboard ---

const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
const moves = {
  ArrowUp: () => ({query: clamp(state.query - 1, rows)}),
  ArrowDown: () => ({query: clamp(state.query + 1, rows)}),
  ArrowLeft: () => ({key: clamp(state.key - 1, columns)}),
  ArrowRight: () => ({key: clamp(state.key + 1, columns)}),
  Home: () => ({key: 0}),
  End: () => ({key: columns - 1}),
};
const commands = {
  PageUp: () => ({grid: false, head: (state.head + MEAN) % (MEAN + 1)}),
  PageDown: () => ({grid: false, head: (state.head + 1) % (MEAN + 1)}),
  a: () => ({grid: true}),
  m: () => ({grid: false, head: MEAN}),
  Escape: () => ({held: false}),
};

function addKeyboard() {
  byId("map").addEventListener("keydown", (event) => {
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    hideTip();
    change(moves[event.key]());
    byId("announcement").textContent = describe(state.head, state.query, state.key);
  });
  document.addEventListener("keydown", (event) => {
    const wanted = several || event.key === "Escape";
    if (!(event.key in commands) || !wanted || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.tagName === "SELECT") return;
    event.preventDefault();
    change(commands[event.key]());
  });
}

// --- the page ---

function addSettings() {
  byId("colours").value = state.colours;
  byId("colours").addEventListener("change", ({target}) => change({colours: target.value}));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  const name = () => { byId("theme").textContent = isDark() ? "Light" : "Dark"; };
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
    show();
  });
  dark.addEventListener("change", () => { name(); show(); });
  name();
}

byId("title").textContent = data.title;
byId("summary").textContent = data.summary;
byId("notes").textContent = data.notes;
addHeads();
addMap();
if (oneSequence) {
  addStrip("Tokens, shaded by the weight they get", data.keys, ["query", "key"]);
} else {
  addStrip("Queries", data.queries, ["query"]);
  addStrip("Keys, shaded by the weight they get", data.keys, ["key"]);
}
addKeyboard();
addSettings();
new ResizeObserver(show).observe(document.querySelector("figure"));
show();
