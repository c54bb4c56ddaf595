// What is shown of a state; nothing here changes it.
const byId = (id) => document.getElementById(id);
const mapCanvas = document.querySelector("#map canvas");
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const FONT = 'system-ui, "Helvetica Neue", Arial, sans-serif';

// Gives a canvas its size in CSS pixels and as many of the screen's as fill them.
function contextOf(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// Whole pixels where a cell has room for one; colours are mixed where it has not.
function cellSides(width, height, most) {
  const longer = Math.min(width / columns, height / rows);
  const side = longer >= 1 ? Math.min(Math.floor(longer), most) : longer;
  const thick = (count) => Math.max(side, Math.min(most, Math.floor(48 / count)));
  return {x: thick(columns), y: thick(rows)};
}

function drawCells(context, head, colours, x, y, cell) {
  context.imageSmoothingEnabled = cell.x < 1 || cell.y < 1;
  context.imageSmoothingQuality = "high";
  context.drawImage(imageOf(head, colours), x, y, columns * cell.x, rows * cell.y);
}

// The first of 1, 2, 5, 10, ... cells that leaves `room` pixels.
function labelStep(cell, room) {
  for (let decade = 1; ; decade *= 10) {
    for (const step of [decade, 2 * decade, 5 * decade]) if (step * cell >= room) return step;
  }
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const letters = Array.from(text);
  while (letters.length && context.measureText(letters.join("") + "\u2026").width > width) letters.pop();
  return letters.join("") + "\u2026";
}

// Words where every cell shows its own, else indices; the chosen one shows both.
const showsWords = (axis, step) => axis.labels && axis.cells === axis.size && step === 1;
const axisText = (axis, cell, step) =>
  showsWords(axis, step) ? axis.labels[cell] : `${firstOf(axis, cell)}`;
const chosenText = (axis, cell, step) =>
  showsWords(axis, step) ? axis.labels[cell] : cellText(axis, cell);

// Where the large map and its labels stand, for the width that there is.
const LINE = 13;  // the room of a label across its text
const TALLEST = 820;
let layout = null;
function layOut() {
  const context = mapCanvas.getContext("2d");
  context.font = `600 12px ${FONT}`;  // the chosen label's
  // Where words have no room at each cell, the chosen one's label is its index and its word.
  const longest = (axis, most, room) => {
    const words = showsWords(axis, axis.cells * LINE <= room ? 1 : 2);
    let width = 0;
    for (let cell = 0; cell < axis.cells; ++cell) {
      const text = words ? axis.labels[cell] : cellText(axis, cell);
      width = Math.max(width, Math.min(most, context.measureText(text).width));
    }
    return width;
  };
  const available = byId("map").clientWidth;
  const most = Math.min(140, available / 4);
  const left = Math.ceil(longest(data.queries, most, TALLEST)) + 12;
  const widestKey = longest(data.keys, 110, available - left);
  const cell = cellSides(available - left - 2, TALLEST, 34);
  const words = showsWords(data.keys, 1) && cell.x >= LINE;
  let angle = 0, top = 22, keyStep = 1;
  if (!words) {
    keyStep = labelStep(cell.x, context.measureText(`${data.keys.size}`).width + 8);
  } else if (widestKey + 8 > cell.x) {
    angle = cell.x >= 18 ? -Math.PI / 4 : -Math.PI / 2;
    top = Math.ceil(widestKey * -Math.sin(angle)) + 14;
  }
  // Slanted labels stand out on the right.
  let right = columns * cell.x + 2;
  for (let key = 0; angle === -Math.PI / 4 && key < columns; ++key) {
    const width = Math.min(110, context.measureText(data.keys.labels[key]).width);
    right = Math.max(right, (key + 0.5) * cell.x + 0.71 * width + 12);
  }
  layout = {left, top, cell, angle, words, keyStep, rowStep: labelStep(cell.y, LINE), most,
            width: Math.min(available, left + right),
            height: top + rows * cell.y + 2};
  mapCanvas.dataset.layout = [left, top, cell.x, cell.y].join(" ");  // read by tests
}

// A chosen label covers what it stands on.
function drawLabel(context, text, x, y, align, chosen) {
  context.textAlign = align;
  context.font = `${chosen ? "600 " : ""}12px ${FONT}`;
  if (chosen) {
    const width = context.measureText(text).width + 8;
    context.fillStyle = style("--paper");
    context.fillRect(x + 4 - {left: 8, center: 4 + width / 2, right: width}[align], y - 13, width, 18);
  }
  context.fillStyle = style(chosen ? "--accent" : "--muted");
  context.fillText(text, x, y);
}

function drawKeyLabel(context, key, chosen) {
  const {left, top, cell, angle, words, keyStep, width} = layout;
  const step = words ? 1 : Math.max(2, keyStep);
  context.font = `600 12px ${FONT}`;
  const text = shortened(context, (chosen ? chosenText : axisText)(data.keys, key, step), 110);
  let x = left + (key + 0.5) * cell.x + (angle ? 4 : 0);
  const half = context.measureText(text).width / 2 + 4;
  if (!angle) x = Math.min(Math.max(x, half), Math.max(width, 2 * half) - half);
  context.save();
  context.translate(x, top - 6);
  context.rotate(angle);
  drawLabel(context, text, 0, 0, angle ? "left" : "center", chosen);
  context.restore();
}

function drawQueryLabel(context, query, chosen) {
  const {left, top, cell, rowStep, most} = layout;
  context.font = `600 12px ${FONT}`;
  const text = (chosen ? chosenText : axisText)(data.queries, query, rowStep);
  const middle = Math.min(Math.max((query + 0.5) * cell.y, 6), rows * cell.y - 4);
  drawLabel(context, shortened(context, text, most), left - 7, top + middle + 4, "right", chosen);
}

// Around cells, on none of their pixels.
function drawFrame(context, x, y, width, height, thickness) {
  context.lineWidth = thickness;
  context.strokeStyle = style("--accent");
  context.strokeRect(x - thickness / 2, y - thickness / 2, width + thickness, height + thickness);
}

function drawMap(state) {
  layOut();
  const {left, top, cell, width, height, keyStep, rowStep} = layout;
  const context = contextOf(mapCanvas, width, height);
  drawCells(context, state.head, state.colours, left, top, cell);
  context.strokeStyle = style("--line");
  context.strokeRect(left - 0.5, top - 0.5, columns * cell.x + 1, rows * cell.y + 1);
  for (let key = 0; key < columns; key += keyStep) drawKeyLabel(context, key, false);
  for (let query = 0; query < rows; query += rowStep) drawQueryLabel(context, query, false);
  drawQueryLabel(context, state.query, true);
  drawKeyLabel(context, state.key, true);
  const y = top + state.query * cell.y, thickness = cell.y < 6 ? 1 : 2;
  drawFrame(context, left, y, columns * cell.x, cell.y, thickness);
  drawFrame(context, left + state.key * cell.x, y, cell.x, cell.y, thickness);
}

function drawGrid(state) {
  for (const button of byId("grid").children) {
    const width = Math.max(60, button.clientWidth - 18);
    const cell = cellSides(width, width * 1.4, 24);
    const canvas = button.firstChild;
    const context = contextOf(canvas, columns * cell.x, rows * cell.y);
    drawCells(context, Number(button.dataset.head), state.colours, 0, 0, cell);
    drawFrame(context, 1, state.query * cell.y, columns * cell.x - 2, cell.y, 1);
  }
}

function drawBar(state) {
  const canvas = document.querySelector("#bar canvas"), context = canvas.getContext("2d");
  const image = context.createImageData(256, 1), table = tables[state.colours];
  for (let i = 0; i < 256; ++i) image.data.set([...table.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  context.putImageData(image, 0, 0);
  byId("ticks").replaceChildren(...data.ticks.map((tick) => {
    const mark = document.createElement("span");
    mark.textContent = tick.text;
    mark.style.left = `${100 * positionOf(tick.value)}%`;
    return mark;
  }));
}

function listItem(index, name, value, length) {
  const item = document.createElement("li");
  const [label, bar, number] = ["name", "length", "value"].map((kind) => {
    const part = document.createElement("span");
    part.className = kind;
    return item.appendChild(part);
  });
  const muted = document.createElement("i");
  muted.textContent = index;
  label.append(muted, name === "" ? "" : ` ${name}`);
  label.title = `${index} ${name}`;
  bar.style.width = `${100 * length}%`;
  number.textContent = numberText(value);
  return item;
}

const argmax = (row) => row.reduce((best, value, i) => value > row[best] ? i : best, 0);
const rowOf = (head, query) => valuesOf(head).subarray(query * columns, (query + 1) * columns);

// The strongest keys of the chosen query; with all heads in view, the strongest key of each.
function drawRow(state) {
  byId("chosen").textContent = `Query ${cellText(data.queries, state.query)}`;
  byId("pin").textContent = state.held ? "Held: click again or press Esc to let go."
    : state.grid ? "The strongest key of each head" : `The strongest keys of ${nameOf(state.head) || "this map"}`;
  byId("pin").classList.toggle("held", state.held);
  const items = [];
  if (state.grid) {
    for (let head = 0; head < MEAN; ++head) {
      const row = rowOf(head, state.query), key = argmax(row);
      items.push(listItem(`${nameOf(head)} \u2192`, cellText(data.keys, key), row[key], Math.max(row[key], 0) / Math.max(data.largest, row[key])));
    }
  } else {
    const row = rowOf(state.head, state.query);
    const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a]).slice(0, 10);
    const largest = Math.max(row[order[0]], 1e-30);
    for (const key of order) {
      if (row[key] < 0) continue;
      const {index, token} = cellName(data.keys, key);
      items.push(listItem(index, token, row[key], row[key] / largest));
    }
  }
  byId("strongest").replaceChildren(...items);
}

// The tokens of the keys, shaded by what the chosen query gives them.
function drawStrips(state) {
  const row = rowOf(state.grid ? MEAN : state.head, state.query);
  const largest = Math.max(row[argmax(row)], 1e-30);
  for (const token of document.querySelectorAll("#strips [data-key]")) {
    const value = Math.max(row[Number(token.dataset.key)], 0);
    token.classList.toggle("strong", value > 0.6 * largest);
    token.style.background = value === 0 ? "" : `rgb(var(--wash) / ${(0.85 * Math.sqrt(value / largest)).toFixed(3)})`;
  }
  for (const token of document.querySelectorAll("#strips [data-query]")) {
    const chosen = Number(token.dataset.query) === state.query;
    token.classList.toggle("query", chosen);
    const strip = token.parentElement;
    if (chosen && !strip.matches(":hover")) {
      strip.scrollTop = token.offsetTop - strip.offsetTop - strip.clientHeight / 2;
    }
  }
}
