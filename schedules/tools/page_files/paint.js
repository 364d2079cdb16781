// The timeline of one panel. Only what is visible is drawn; where boxes would be too narrow, a row
// shows how its time is divided among the kinds (dense.js).

const LABEL = 11; // pixels of text in a box
const SMALL = 9; // and where the page is narrow
const READABLE = 11; // pixels per action that a narrow page opens with
const DENSE = 2.2; // pixels per box below which a row is drawn in columns

/** Where things stand, in CSS pixels. */
function layOut(entry, width) {
  const narrow = width < 560, deep = $("memory").checked;
  const row = Math.max(3, Math.min(30, Math.floor(1100 / entry.ranks)));
  const memory = deep ? Math.max(6, Math.round(row * 0.8)) : 0;
  const gap = row > 12 ? 5 : row > 6 ? 2 : 1;
  const left = narrow ? 30 : 68, pitch = row + memory + gap;
  const bottom = 4 + entry.ranks * pitch;
  return { width, left, right: width - 10, plot: width - left - 10, top: 4, row, memory, pitch, bottom, height: bottom + 26, narrow, text: narrow ? SMALL : LABEL };
}

function paint(panel, context, box) {
  const rows = rowsOf(panel.entry, panel.report), colours = currentTheme();
  const scale = box.plot / (view.end - view.start);
  const pen = {
    context, box, colours, scale, panel,
    x: (time) => box.left + (time - view.start) * scale,
    labels: labelForm(panel, context, scale),
  };
  paintAxis(pen);
  context.save();
  context.beginPath();
  context.rect(box.left, 0, box.plot, box.height);
  context.clip();
  const most = Math.max(...panel.report.peak, 1);
  rows.forEach((row, n) => {
    const y = box.top + n * box.pitch;
    paintRow(pen, row, y);
    if (box.memory) paintHeld(pen, row.held, y + box.row + 2, box.memory - 2, most);
  });
  paintEnd(pen);
  context.restore();
  paintNames(pen, rows.length);
}

/** Names of the ranks, every so many where they would touch. */
function paintNames({ context, box, colours, panel }, count) {
  const every = Math.ceil(13 / box.pitch);
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (let rank = 0; rank < count; rank += every) {
    const y = box.top + rank * box.pitch;
    context.fillStyle = colours.text;
    context.font = `13px ${colours.font}`;
    context.fillText(box.narrow ? `${rank}` : `rank ${rank}`, box.left - 9, y + box.row / 2 + 0.5);
    if (box.memory < 12 || box.narrow) continue;
    context.fillStyle = colours.muted;
    context.font = `11px ${colours.font}`;
    context.fillText(`peak ${panel.report.peak[rank]}`, box.left - 9, y + box.row + box.memory / 2);
  }
}

/** A narrow page opens with the begin of a long step, so that the numbers in its boxes can be read. */
function openNarrow({ entry, report, canvas }) {
  const { narrow, plot } = layOut(entry, canvas.parentElement.clientWidth);
  const actions = ordersOf(entry).reduce((count, order) => count + order.kinds.length, 0);
  if (narrow) look(0, (plot / READABLE) * (sum(report.work) / actions));
}

/** "full" if every label fits in the shortest action, "short" for microbatches alone, or "". */
function labelForm(panel, context, scale) {
  if (layOut(panel.entry, 1000).row < 13) return "";
  context.font = `${panel.box.text}px ${currentTheme().font}`;
  const room = shortest(panel.entry, panel.report) * scale - 5;
  const { stages, microbatches, slices = 1 } = panel.entry;
  const unit = unitText(panel.entry, microbatches * slices - 1);
  const full = `${chunksOf(panel.entry) > 1 ? stages - 1 : ""}W${unit}`;
  return context.measureText(full).width <= room ? "full" : "short";
}

function paintAxis({ context, box, colours, x, panel }) {
  context.strokeStyle = colours.rule;
  context.fillStyle = colours.muted;
  context.lineWidth = 1;
  context.font = `12px ${colours.font}`;
  context.textBaseline = "top";
  context.textAlign = "center";
  const [size, name] = unitOf(panel.entry);
  for (const time of ticks(view.start, view.end, box.plot / 90)) {
    const at = Math.round(x(time)) + 0.5;
    line(context, [at, 0, at, box.bottom + 4]);
    const text = number(time / size), half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(box.width - half, at), box.bottom + 8);
  }
  context.textAlign = "left";
  context.fillText(name, 0, box.bottom + 8);
}

function paintRow(pen, row, y) {
  const { context, box, colours, x } = pen;
  const end = Math.min(x(pen.panel.report.makespan), box.right);
  context.fillStyle = colours.idle;
  context.fillRect(x(0), y, Math.max(0, end - x(0)), box.row);
  const first = firstAbove(row.ends, view.start), stop = firstAbove(row.starts, view.end);
  const from = Math.max(0, first - 1); // and what takes no time at the very edge
  if (stop - first > box.plot / DENSE) return paintDense(pen, row, y);
  paintWaits(pen, row.waits, y);
  paintCommon(pen, row.common, y);
  for (let n = from; n < stop; n++) paintBox(pen, row, n, y);
  for (const n of row.joined) if (n + 1 >= from && n < stop) paintPair(pen, row, n, y);
}

function paintBox({ context, box, colours, x, panel, labels }, row, n, y) {
  const kind = KINDS[row.kinds[n]], chunk = panel.entry.chunks[row.stages[n]];
  const left = x(row.starts[n]), right = x(row.ends[n]);
  const gap = right - left > 4 && box.row > 6 ? 1 : 0;
  const shape = [left, y, Math.max(0.8, right - left - gap), box.row];
  context.fillStyle = colours.fill[kind];
  if (shape[2] > 8 && box.row > 10) {
    context.beginPath();
    context.roundRect(...shape, 2.5);
    context.fill();
  } else context.fillRect(...shape);
  const pattern = box.row > 6 && shape[2] > 3 && chunkTexture(context, kind, chunk);
  if (pattern) {
    context.fillStyle = pattern;
    context.fillRect(...shape);
  }
  const from = Math.max(left, box.left), to = Math.min(right, box.right) - gap;
  if (!labels || to - from < 6) return;
  const short = unitText(panel.entry, row.microbatches[n]), stage = chunksOf(panel.entry) > 1 ? row.stages[n] : "";
  const text = labels === "full" ? `${stage}${kind}${short}` : `${short}`;
  context.font = `${box.text}px ${colours.font}`;
  if (context.measureText(text).width + (box.narrow ? 0 : 3) > to - from) return;
  label(context, text, {
    middle: (from + to) / 2,
    y: y + box.row / 2 + 0.5,
    colour: colours.ink[kind],
    rim: pattern ? colours.fill[kind] : null,
    size: box.text,
  });
}

function label(context, text, { middle, y, colour, rim, size = LABEL }) {
  context.font = `${size}px ${currentTheme().font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  if (rim) {
    context.lineWidth = 4;
    context.lineJoin = "round";
    context.strokeStyle = rim;
    context.strokeText(text, middle, y);
  }
  context.fillStyle = colour;
  context.fillText(text, middle, y);
}

/** An overlapped pair: one outline around both boxes. */
function paintPair({ context, box, colours, x }, row, n, y) {
  const left = x(row.starts[n]), right = x(row.ends[n + 1]);
  if (right - left < 6 || box.row < 6) return;
  context.strokeStyle = colours.text;
  context.lineWidth = 1.5;
  context.beginPath();
  context.roundRect(left + 0.25, y + 0.75, right - left - 1.5, box.row - 1.5, 2.5);
  context.stroke();
}

/** Idle time: the texture of its cause, and the word where it fits. */
function paintWaits({ context, box, colours, x }, waits, y) {
  const first = firstAbove(waits.ends, view.start), stop = firstAbove(waits.starts, view.end);
  for (let n = first; n < stop; n++) {
    const left = Math.max(x(waits.starts[n]), box.left), right = Math.min(x(waits.ends[n]), box.right);
    if (right - left < 2) continue;
    const cause = CAUSES[waits.causes[n]], pattern = causeTexture(context, cause);
    if (pattern) {
      context.fillStyle = pattern;
      context.fillRect(left, y, right - left - 1, box.row);
    }
    context.font = `${LABEL}px ${colours.font}`;
    if (box.row < 13 || context.measureText(cause).width + 14 > right - left) continue;
    const middle = (left + right - 1) / 2;
    label(context, cause, { middle, y: y + box.row / 2 + 0.5, colour: colours.muted, rim: colours.idle });
  }
}

/** What all ranks do together. */
function paintCommon({ context, box, colours, x }, { starts, ends }, y) {
  context.fillStyle = colours.shared;
  const stop = firstAbove(starts, view.end);
  for (let n = firstAbove(ends, view.start); n < stop; n++) {
    context.fillRect(x(starts[n]), y, Math.max(0.8, x(ends[n]) - x(starts[n]) - 0.5), box.row);
  }
}

/** What a rank holds, as steps under its row. */
function paintHeld({ context, box, colours, x }, { times, counts }, y, height, most) {
  const first = Math.max(0, firstAbove(times, view.start) - 1), stop = firstAbove(times, view.end);
  const level = (n) => y + height - (n < 0 ? 0 : counts[n] / most) * height;
  const path = new Path2D(), begin = Math.max(box.left, x(0));
  let at = begin, high = level(first - 1);
  path.moveTo(at, high);
  for (let n = first; n < stop; n++) {
    const next = Math.max(at, x(times[n]));
    let top = level(n);
    while (n + 1 < stop && x(times[n + 1]) < next + 0.5) top = Math.min(top, level(++n));
    path.lineTo(next, high);
    path.lineTo(next, top);
    [at, high] = [next, level(n)];
  }
  const end = stop < times.length ? box.right : at, area = new Path2D(path);
  path.lineTo(end, high);
  area.lineTo(end, high);
  area.lineTo(end, y + height);
  area.lineTo(begin, y + height);
  context.fillStyle = colours.accent;
  context.globalAlpha = 0.22;
  context.fill(area);
  context.globalAlpha = 1;
  context.strokeStyle = colours.accent;
  context.lineWidth = 1;
  context.stroke(path);
}

/** A line where the last rank ends. */
function paintEnd({ context, box, colours, x, panel }) {
  const at = Math.min(Math.round(x(panel.report.makespan)) - 0.5, box.right - 0.75);
  if (x(panel.report.makespan) > box.right + 1) return;
  context.strokeStyle = colours.text;
  context.lineWidth = 1.5;
  line(context, [at, 0, at, box.bottom + 4]);
}
