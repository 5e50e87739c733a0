// What is drawn: sparklines, bars, lines and the map of the page pool. Colours are those of style.css.
// Called by page.js; every function draws the whole canvas anew, in the size that it has on the page.

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

let colours = {};
const named = (name) => {
  if (!(name in colours)) {
    colours[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }
  return colours[name];
};
export const forgetColours = () => { colours = {}; };

// A cleared canvas in device pixels, drawn in CSS pixels; null while it is not shown.
function open(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const scale = Math.min(devicePixelRatio || 1, 3);
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// A line over its area; null among the values leaves a gap that the line crosses.
function curve(pen, points, bottom, colour, fill) {
  if (!points.length) return;
  pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.lineJoin = "round";
  pen.lineWidth = 1.75;
  pen.strokeStyle = colour;
  pen.stroke();
  if (!fill) return;
  pen.lineTo(points.at(-1)[0], bottom);
  pen.lineTo(points[0][0], bottom);
  pen.globalAlpha = 0.14;
  pen.fillStyle = colour;
  pen.fill();
  pen.globalAlpha = 1;
}

export function sparkline(canvas, values, colour) {
  const opened = open(canvas);
  if (!opened) return;
  const { pen, width, height } = opened;
  const known = values.filter((v) => v !== null);
  pen.fillStyle = named("line");
  pen.fillRect(0, height - 1, width, 1);
  const most = Math.max(...known, 0);
  if (!most) return;
  const step = width / Math.max(1, values.length - 1);
  const at = (v) => height - 2 - (v / most) * (height - 6);
  const points = values.flatMap((v, i) => (v === null ? [] : [[i * step, at(v)]]));
  curve(pen, points, height, named(colour), points.length > 1);
  const [x, y] = points.at(-1);
  pen.beginPath();
  pen.arc(Math.min(x, width - 3), y, 2.6, 0, 7);
  pen.fillStyle = named(colour);
  pen.fill();
}

const AXIS = 34;

function label(pen, text, x, y, align = "right") {
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillStyle = named("quiet");
  pen.fillText(text, x, y);
}

function grid(pen, width, y) {
  pen.fillStyle = named("line");
  pen.fillRect(AXIS, Math.round(y), width - AXIS, 1);
}

// One bar a step; its height grows with the root of its tokens, so that eight beside a thousand are seen.
export function bars(canvas, steps) {
  const opened = open(canvas);
  if (!opened) return;
  const { pen, width, height } = opened;
  const pitch = 6;
  const shown = steps.slice(-Math.floor((width - AXIS) / pitch));
  const tokens = (s) => s.num_decode_tokens + s.num_chunk_tokens + s.num_padding_tokens;
  const most = Math.max(16, ...shown.map(tokens));
  const top = 8, room = height - top - 4;
  const tall = (n) => room * Math.sqrt(n / most);
  for (const tick of ticks(most)) {
    grid(pen, width, top + room - tall(tick));
    label(pen, tick, AXIS - 7, top + room - tall(tick));
  }
  shown.forEach((step, i) => {
    const parts = [["decode", step.num_decode_tokens], ["chunk", step.num_chunk_tokens], ["padding", step.num_padding_tokens]];
    const total = tokens(step);
    const x = width - (shown.length - i) * pitch;
    let y = top + room;
    for (const [name, n] of parts) {
      const part = total ? (tall(total) * n) / total : 0;
      pen.fillStyle = named(name);
      pen.fillRect(x, y - part, pitch - 1.5, part);
      y -= part;
    }
  });
}

// 0 and a few powers of four below `most`, and `most`.
function ticks(most) {
  const found = [0, most];
  for (let tick = most / 4; tick >= most / 16; tick /= 4) found.push(Math.round(tick));
  return found;
}

export function lines(canvas, series) {
  const opened = open(canvas);
  if (!opened) return;
  const { pen, width, height } = opened;
  const most = Math.max(1, ...series.flatMap((one) => one.values));
  const top = 8, room = height - top - 8;
  for (const tick of most > 1 ? [0, Math.ceil(most / 2), most] : [0, 1]) {
    grid(pen, width, top + room - (room * tick) / most);
    label(pen, tick, AXIS - 7, top + room - (room * tick) / most);
  }
  const longest = Math.max(...series.map((one) => one.values.length));
  const step = (width - AXIS - 2) / Math.max(1, longest - 1);
  for (const { values, colour, fill } of series) {
    const points = values.map((v, i) => [AXIS + i * step, top + room - (room * v) / most]);
    curve(pen, points, top + room, named(colour), fill);
  }
}

const STATES = ["free", "free", "cached", "owned", "shared"]; // by number; 0 is nobody's
const FADE_MS = 900;

// The page pool, a cell for a page or for several; what changed lights up and fades.
export class PoolMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.cells = new Uint8Array(0);
    this.lit = new Map(); // cell -> when it changed
    this.frame = 0;
  }

  show(cells) {
    if (cells.length === this.cells.length && !calm.matches) {
      const now = performance.now();
      cells.forEach((state, i) => { if (state !== this.cells[i]) this.lit.set(i, now); });
    }
    this.cells = cells;
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    if (!this.cells.length) return;
    this.canvas.style.height = ""; // as high as it may be, then as high as its rows are
    const room = { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
    if (!room.width || !room.height) return;
    this.layOut(room);
    this.canvas.style.height = `${Math.ceil(Math.ceil(this.cells.length / this.columns) * this.size)}px`;
    this.opened = open(this.canvas);
    for (let i = 0; i < this.cells.length; i++) this.cell(i, 1);
    if (this.lit.size) this.frame = requestAnimationFrame(() => this.fade());
  }

  // Cells as large as fit, in rows that fill the width.
  layOut({ width, height }) {
    const n = this.cells.length;
    this.columns = Math.max(1, Math.floor(width / Math.min(26, Math.sqrt((width * height) / n))));
    while (Math.ceil(n / this.columns) * (width / this.columns) > height) this.columns++;
    this.size = Math.min(30, width / this.columns);
    this.gap = this.size > 14 ? 3 : this.size > 7 ? 2 : this.size > 3.5 ? 1 : 0.4;
  }

  cell(i, light) {
    const { pen } = this.opened;
    const [x, y] = [(i % this.columns) * this.size, Math.floor(i / this.columns) * this.size];
    const side = this.size - this.gap;
    pen.fillStyle = named(STATES[this.cells[i]] ?? "free");
    if (side < 6) {
      pen.fillRect(x, y, side, side);
    } else {
      pen.beginPath();
      pen.roundRect(x, y, side, side, Math.min(4, side / 4));
      pen.fill();
    }
    if (light < 1) {
      pen.globalAlpha = 0.8 * (1 - light);
      pen.fillStyle = "#fff";
      if (side < 6) pen.fillRect(x, y, side, side);
      else pen.fill();
      pen.globalAlpha = 1;
    }
  }

  fade() {
    const now = performance.now();
    const { pen } = this.opened;
    for (const [i, since] of this.lit) {
      const light = Math.min(1, (now - since) / FADE_MS);
      const [x, y] = [(i % this.columns) * this.size, Math.floor(i / this.columns) * this.size];
      pen.clearRect(x, y, this.size, this.size);
      this.cell(i, light);
      if (light >= 1) this.lit.delete(i);
    }
    if (this.lit.size) this.frame = requestAnimationFrame(() => this.fade());
  }

  // The cell under a pointer, and its state; null where there is none.
  at(event) {
    if (!this.size) return null;
    const column = Math.floor(event.offsetX / this.size);
    const index = Math.floor(event.offsetY / this.size) * this.columns + column;
    if (column >= this.columns || index >= this.cells.length) return null;
    return { index, state: STATES[this.cells[index]] };
  }
}
