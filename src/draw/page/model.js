// The weights and what may be asked of them. A stored number is 0 for a blank, else one more than
// the square root of its part of the largest weight in 65534 steps.
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.queries.cells, columns = data.keys.cells, size = rows * columns;

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const packed = new DataView(bytesOf(data.values).buffer);
const BLANK = -1;

function decode(head) {
  const values = new Float32Array(size);
  for (let i = 0, at = 2 * head * size; i < size; ++i, at += 2) {
    const code = packed.getUint16(at, true);
    const root = (code - 1) / 65534;
    values[i] = code === 0 ? BLANK : root * root * data.packed_largest;
  }
  return values;
}

function meanOfHeads() {
  const mean = new Float32Array(size).fill(BLANK);
  for (let head = 0; head < data.names.length; ++head) {
    const values = valuesOf(head);
    for (let i = 0; i < size; ++i) {
      if (values[i] > 0) mean[i] = Math.max(mean[i], 0) + values[i] / data.names.length;
    }
  }
  return mean;
}

// Heads are decoded when they are first shown; the one after the last is their mean.
const MEAN = data.names.length;
const decoded = new Map();
function valuesOf(head) {
  if (!decoded.has(head)) decoded.set(head, head === MEAN ? meanOfHeads() : decode(head));
  return decoded.get(head);
}
const nameOf = (head) => head === MEAN ? "mean of all heads" : data.names[head];

function positionOf(value) {
  const part = Math.min(value / data.largest, 1);
  return data.scale === "linear" ? part : Math.sqrt(part);
}

const numberText = (value) => {
  if (value < 0) return "blank";
  if (value === 0) return "\u2248 0";  // too small for the stored digits
  return value >= 0.001 ? value.toFixed(4) : value.toExponential(2);
};

const firstOf = (axis, cell) => Math.floor(cell * axis.size / axis.cells);

// The token of a cell, or "40–47 token" of the first where several share it.
function cellName(axis, cell) {
  const first = firstOf(axis, cell), last = firstOf(axis, cell + 1) - 1;
  const index = last > first ? `${first}\u2013${last}` : `${first}`;
  return {index, token: axis.labels ? axis.labels[first] : ""};
}
function cellText(axis, cell) {
  const {index, token} = cellName(axis, cell);
  return token === "" ? index : `${index} ${token}`;
}
const oneSequence = JSON.stringify(data.queries) === JSON.stringify(data.keys);

const tables = {};
for (const [name, base64] of Object.entries(data.colour_maps)) tables[name] = bytesOf(base64);

// One pixel a cell, drawn once for each head and colour map.
const images = new Map();
function imageOf(head, colours) {
  const key = `${head} ${colours}`;
  if (images.has(key)) return images.get(key);
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const values = valuesOf(head), table = tables[colours];
  for (let i = 0; i < size; ++i) {
    if (values[i] < 0) continue;
    const colour = 3 * Math.round(positionOf(values[i]) * 255);
    image.data.set([table[colour], table[colour + 1], table[colour + 2], 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  images.set(key, canvas);
  return canvas;
}
