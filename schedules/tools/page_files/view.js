// The visible part of the time axis, which all panels share, and how numbers are written.

const view = { start: 0, end: 1, whole: 1, least: 1e-6 };
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let glide = 0; // the animation under way

/** Let the axis reach from 0 to the longest makespan shown; a view of everything stays one. */
function span(reports) {
  const longest = Math.max(...reports.map((report) => report.makespan));
  const fitted = view.start === 0 && view.end === view.whole;
  view.whole = longest > 0 ? longest : 1;
  view.least = view.whole * 1e-6;
  if (fitted) look(0, view.whole);
  else look(view.start, view.end);
}

/** Show a part, moved and widened to what there is. */
function look(start, end) {
  const width = Math.min(view.whole, Math.max(view.least, end - start));
  const middle = (start + end) / 2;
  view.start = Math.max(0, Math.min(view.whole - width, middle - width / 2));
  view.end = view.start + width >= view.whole * (1 - 1e-12) ? view.whole : view.start + width;
  invalidate();
}

/** The same, gliding there unless the reader prefers stillness. */
function glideTo(start, end) {
  cancelAnimationFrame(glide);
  if (calm.matches) return look(start, end);
  const from = { ...view }, begun = performance.now(), lasts = 160;
  const step = (now) => {
    const share = Math.min(1, Math.max(0, (now - begun) / lasts)), eased = 1 - (1 - share) ** 3;
    const part = (a, b) => a + (b - a) * eased;
    look(part(from.start, start), part(from.end, end));
    if (share < 1) glide = requestAnimationFrame(step);
  };
  glide = requestAnimationFrame(step);
}

/** Zoom by a factor (above 1: closer) about a time that stays where it is. */
function zoom(factor, about = (view.start + view.end) / 2, move = glideTo) {
  const width = Math.min(view.whole, Math.max(view.least, (view.end - view.start) / factor));
  const share = (about - view.start) / (view.end - view.start);
  const start = Math.max(0, Math.min(view.whole - width, about - share * width));
  move(start, start + width);
}

function pan(by, move = glideTo) {
  const width = view.end - view.start;
  const start = Math.max(0, Math.min(view.whole - width, view.start + by));
  move(start, start + width);
}

/** Round times within a stretch, no more than a number of them. */
function ticks(start, end, most) {
  const rough = (end - start) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const result = [];
  for (let n = Math.ceil(start / step - 1e-9); n * step <= end * (1 + 1e-12); n++) result.push(n * step);
  return result;
}

/** Up to six digits, a true minus, thin spaces between thousands. */
function number(value) {
  const text = String(Number(value.toPrecision(6))).replace("-", "−");
  const [whole, rest] = text.split(".");
  if (text.includes("e")) return text;
  const spaced = whole.length > 5 ? whole.replace(/\B(?=(\d{3})+$)/g, "\u202f") : whole;
  return rest === undefined ? spaced : `${spaced}.${rest}`;
}

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];

/** The unit in which times of a schedule are written: [its size, its name]; costs have no name. */
function unitOf(entry) {
  return entry.unit ? (UNITS.find(([size]) => view.whole >= size) ?? UNITS.at(-1)) : [1, ""];
}

/** A time, with its unit where that is known. */
function timeText(entry, time) {
  const [size, name] = unitOf(entry);
  return name ? `${number(time / size)} ${name}` : number(time);
}

/** A share in per cent; what is not nothing never reads as nothing. */
function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1%";
  return `${(100 * share).toFixed(1)}%`;
}
const signed = (text, value) => (value > 0 ? `+${text}` : text);
