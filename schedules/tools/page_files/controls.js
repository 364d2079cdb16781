// Pointer, wheel and keys on the timelines, and the overview below them.

const timeAt = (panel, x) =>
  view.start + ((x - panel.box.left) / panel.box.plot) * (view.end - view.start);

function pointOf(panel, event) {
  const { left, top } = panel.canvas.getBoundingClientRect();
  return [event.clientX - left, event.clientY - top];
}

function listen(panel) {
  const { canvas } = panel;
  let grip = null; // where a drag holds the axis
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    grip = { x: event.clientX, start: view.start, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = pointOf(panel, event);
    if (!grip) return select(panel, find(panel, x, y), event.clientX, event.clientY);
    const by = event.clientX - grip.x;
    grip.moved ||= Math.abs(by) > 3;
    if (!grip.moved) return;
    canvas.classList.add("held");
    select(panel, null);
    const start = grip.start - (by / panel.box.plot) * (view.end - view.start);
    pan(start - view.start, look);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      if (grip && !grip.moved && event.pointerType === "touch") {
        select(panel, find(panel, ...pointOf(panel, event)), event.clientX, event.clientY);
      }
      grip = null;
      canvas.classList.remove("held");
    });
  }
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch" && !grip) select(panel, null);
  });
  canvas.addEventListener("dblclick", (event) => zoom(2, timeAt(panel, pointOf(panel, event)[0])));
  canvas.addEventListener("wheel", (event) => turn(panel, event), { passive: false });
  canvas.addEventListener("keydown", (event) => press(panel, event));
  canvas.addEventListener("blur", () => select(panel, null));
}

/** The wheel scrolls the page; with Ctrl, or pinched, it zooms; sideways it moves. */
function turn(panel, event) {
  const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * unit * 0.0025), timeAt(panel, pointOf(panel, event)[0]), look);
  } else {
    const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
    if (Math.abs(sideways) <= (event.shiftKey ? 0 : Math.abs(event.deltaY))) return;
    event.preventDefault();
    pan((sideways * unit * (view.end - view.start)) / panel.box.plot, look);
  }
  select(panel, null);
}

function press(panel, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const step = 0.15 * (view.end - view.start), about = panel.item ? middle(panel.item) : undefined;
  const actions = {
    ArrowLeft: () => (event.shiftKey ? walk(panel, -1, 0) : pan(-step)),
    ArrowRight: () => (event.shiftKey ? walk(panel, 1, 0) : pan(step)),
    ArrowUp: () => walk(panel, 0, -1),
    ArrowDown: () => walk(panel, 0, 1),
    "+": () => zoom(1.6, about),
    "=": () => zoom(1.6, about),
    "-": () => zoom(1 / 1.6, about),
    "_": () => zoom(1 / 1.6, about),
    0: () => glideTo(0, view.whole),
    Home: () => glideTo(0, view.whole),
    Enter: () => panel.item && closeUp(panel.item),
    Escape: () => select(panel, null),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

const middle = (item) => (timesOf(item)[0] + timesOf(item)[1]) / 2;

function closeUp(item) {
  const [start, end] = timesOf(item), margin = 3 * Math.max(end - start, view.least);
  glideTo(Math.max(0, start - margin), Math.min(view.whole, end + margin));
}

/** Move the selection along a rank or to the next one, into view, and read it aloud. */
function walk(panel, along, across) {
  const rows = rowsOf(panel.entry, panel.report), was = panel.item;
  let item;
  if (!was || was.type === "held") item = first(rows[was ? was.row.rank : 0]);
  else if (along) item = beside(was, along);
  else {
    const row = rows[Math.max(0, Math.min(rows.length - 1, was.row.rank + across))];
    item = at(row, middle(was)) ?? first(row);
  }
  if (!item) return;
  const [start, end] = timesOf(item), width = view.end - view.start;
  if (end > view.end || start < view.start) look(middle(item) - width / 2, middle(item) + width / 2);
  const { box, canvas } = panel, corner = canvas.getBoundingClientRect();
  const x = box.left + ((middle(item) - view.start) / (view.end - view.start)) * box.plot;
  const y = box.top + item.row.rank * box.pitch + box.row;
  select(panel, item, corner.left + x, corner.top + y);
  $("said").textContent = tell(panel, item).join(", ");
}

/** What begins first on a rank, or first in view. */
function first(row) {
  const visible = at(row, Math.max(view.start, Math.min(row.starts[0], row.waits.starts[0] ?? Infinity)));
  return visible ?? { row, type: "action", index: 0, time: row.starts[0] };
}

/** How busy all ranks are over the whole step, and which part of it is visible. */
function paintOverview(panels) {
  const canvas = $("overview"), { left, plot, width } = panels[0].box, lane = 14;
  const height = panels.length * (lane + 4) + 4, context = prepare(canvas, width, height), colours = currentTheme();
  const x = (time) => left + (time / view.whole) * plot;
  panels.forEach((panel, n) => {
    const y = 2 + n * (lane + 4), busy = busyOf(panel, 300), end = x(panel.report.makespan);
    context.fillStyle = colours.idle;
    context.fillRect(left, y, end - left, lane);
    const size = (end - left) / busy.length, path = new Path2D();
    path.moveTo(left, y + lane);
    busy.forEach((share, c) => {
      path.lineTo(left + c * size, y + lane * (1 - share));
      path.lineTo(left + (c + 1) * size, y + lane * (1 - share));
    });
    path.lineTo(end, y + lane);
    context.fillStyle = colours.muted;
    context.globalAlpha = 0.55;
    context.fill(path);
    context.globalAlpha = 1;
  });
  const from = x(view.start), to = Math.max(from + 3, x(view.end));
  context.fillStyle = colours.paper;
  context.globalAlpha = 0.66;
  context.fillRect(left, 0, from - left, height);
  context.fillRect(to, 0, left + plot - to, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  context.strokeRect(from + 0.75, 0.75, to - from - 1.5, height - 1.5);
}

/** The share of ranks at work, column by column of the step. */
function busyOf({ entry, report }, count) {
  if (report.busy) return report.busy;
  const busy = new Float64Array(count), scale = report.makespan ? count / report.makespan : 0;
  for (const { starts, ends } of rowsOf(entry, report)) {
    for (let n = 0; n < starts.length; n++) {
      const from = starts[n] * scale, to = Math.min(count, ends[n] * scale);
      for (let c = Math.floor(from); c < to; c++) busy[c] += Math.min(to, c + 1) - Math.max(from, c);
    }
  }
  report.busy = busy.map((time) => Math.min(1, time / entry.ranks));
  return report.busy;
}

function listenToOverview() {
  const canvas = $("overview");
  const move = (event) => {
    if (!event.buttons) return;
    const { left, plot } = panels[0].box, x = event.clientX - canvas.getBoundingClientRect().left;
    const about = ((x - left) / plot) * view.whole, half = (view.end - view.start) / 2;
    const start = Math.max(0, Math.min(view.whole - 2 * half, about - half));
    look(start, start + 2 * half);
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    move(event);
  });
  canvas.addEventListener("pointermove", move);
}
