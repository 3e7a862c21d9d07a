"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [select, told, clusterList, text, canvas] =
  ["head", "told", "clusters", "text", "map"].map((name) => document.getElementById(name));
const N = data.units.length, last = data.first + data.count - 1;
let sheet = null, chosen = data.chosen;

// Position i holds unit i - 1 and predicts unit i; key 0 holds the start of the text, shown as a mark of its own.
const spans = [];
const piece = (label, kind) => {
  const span = document.createElement("span");
  span.textContent = label;
  if (kind) span.className = kind;
  text.append(span);
  return span;
};
const start = piece("⊢", "mark");
data.units.forEach((unit, i) => {
  const span = piece(unit, i >= data.first && i <= last ? "asked" : "");
  span.dataset.at = i;
  spans.push(span);
});
const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const holder = (key) => (key === 0 ? start : spans[key - 1]);

const bytes = async (packed) => {
  const raw = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
const hue = (cluster) => (cluster < 0 ? data.plain : (cluster * data.golden + 10) % 360);
const alpha = (shade) => 0.22 + 0.7 * shade / data.shades;
const colour = (cluster, shade) => `hsl(${hue(cluster).toFixed(1)} 80% var(--light) / ${alpha(shade).toFixed(2)})`;
const clusterAt = (row, key) => (sheet.rows ? sheet.rows[row][sheet.places[row * N + key]] : -1);

function show() {
  const row = chosen - data.first, read = new Map();
  let keys = 0, far = 0;
  for (let key = 0; key < N; key++) {
    const shade = sheet.shades[row * N + key], style = holder(key).style;
    style.background = shade ? colour(clusterAt(row, key), shade) : "";
    if (!shade) continue;
    keys++;
    far = Math.max(far, chosen - key);
    read.set(clusterAt(row, key), (read.get(clusterAt(row, key)) ?? 0) + 1);
  }
  spans.forEach((span, i) => span.classList.toggle("chosen", i === chosen));
  const unit = JSON.stringify(data.units[chosen].replace("↵\n", "\n"));
  const where = keys ? `reads ${many(keys, "position")}, ${far.toLocaleString("en")} back at the most`
    : "reads nothing: it is in no cluster, and the head gives zero";
  told.textContent = `Position ${chosen.toLocaleString("en")}, which predicts ${unit}, ${where}.`;
  clusterList.replaceChildren(...(sheet.rows ? [...read].sort((a, b) => b[1] - a[1]) : []).map(([cluster, count]) => {
    const entry = document.createElement("li"), mark = document.createElement("i");
    mark.style.background = colour(cluster, data.shades);
    entry.append(mark, ` cluster ${cluster}: ${many(count, "key")}`);
    return entry;
  }));
}

function choose(position, scroll) {
  chosen = Math.min(last, Math.max(data.first, position));
  show();
  drawMap();
  if (scroll) {  // within the text alone: the page stays where it is
    const box = text.getBoundingClientRect(), at = spans[chosen].getBoundingClientRect();
    if (at.top < box.top || at.bottom > box.bottom) text.scrollTop += at.top - box.top - box.height / 2;
  }
}

// The map of the positions that can be asked about: rows are queries, columns are keys, each the one with most weight.
function drawMap() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  if (sheet.drawn?.dark !== dark) sheet.drawn = { dark, image: mapOf(sheet, dark ? 0.55 : 0.46) };
  const { width, height } = sheet.drawn.image, context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [width, height];
  canvas.style.aspectRatio = `${Math.max(width, 2 * height)} / ${Math.max(height, width / 2)}`;
  context.putImageData(sheet.drawn.image, 0, 0);
  context.fillStyle = dark ? "#fff5" : "#0004";
  context.fillRect(0, chosen - data.first, width, 1);
}

function mapOf({ shades }, light) {
  const columns = Math.min(N, 1024), image = new ImageData(columns, data.count), colours = new Map();
  for (let row = 0; row < data.count; row++) {
    for (let x = 0; x < columns; x++) {
      const from = Math.floor(x * N / columns), to = Math.max(from + 1, Math.floor((x + 1) * N / columns));
      let best = 0, at = from;
      for (let key = from; key < to; key++) {
        const shade = shades[row * N + key];
        if (shade > best) [best, at] = [shade, key];
      }
      if (!best) continue;
      const cluster = clusterAt(row, at);
      if (!colours.has(cluster)) colours.set(cluster, rgb(hue(cluster), 0.8, light));
      image.data.set([...colours.get(cluster), 255 * alpha(best)], 4 * (row * columns + x));
    }
  }
  return image;
}

function rgb(degrees, saturation, light) {
  const spread = saturation * Math.min(light, 1 - light);
  return [0, 8, 4].map((n) => {
    const k = (n + degrees / 30) % 12;
    return 255 * (light - spread * Math.max(-1, Math.min(k - 3, 9 - k, 1)));
  });
}

async function useHead(index) {
  const wanted = data.sheets[index];
  if (typeof wanted.shades === "string") {
    const packed = [wanted.shades, ...(wanted.rows ? [wanted.places] : [])];
    [wanted.shades, wanted.places] = await Promise.all(packed.map(bytes));
  }
  if (Number(select.value) !== index) return;
  sheet = wanted;
  choose(chosen, true);
}

for (const layer of [...new Set(data.sheets.map((one) => one.layer))]) {
  const group = document.createElement("optgroup");
  group.label = `layer ${layer}`;
  data.sheets.forEach((one, index) => {
    if (one.layer === layer) group.append(new Option(`layer ${layer}, ${one.name}`, index));
  });
  select.append(group);
}
document.getElementById("caption").textContent =
  `Map: a row for each of the positions ${data.first.toLocaleString("en")} to ${last.toLocaleString("en")}, ` +
  `a column for each key; tap a row.`;
const ready = (work) => work.then(() => { document.body.dataset.ready = "yes"; });
select.addEventListener("change", () => ready(useHead(Number(select.value))));
text.addEventListener("click", (event) => {
  const at = event.target.dataset?.at;
  if (at !== undefined && sheet) choose(Number(at), false);
});
text.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !sheet) return;
  event.preventDefault();
  choose(chosen + step, true);
});
for (const [name, step] of [["back", -1], ["on", 1]])
  document.getElementById(name).addEventListener("click", () => sheet && choose(chosen + step, true));
canvas.addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect();
  if (sheet) choose(data.first + Math.floor((event.clientY - box.top) / box.height * data.count), true);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => sheet && drawMap());
// Heads in clusters are what the page is for.
select.value = Math.max(0, data.sheets.findIndex((one) => one.clusters > 0));
ready(useHead(Number(select.value)));
