// What lies under the pointer or the keyboard's selection: finding it, telling it, outlining it.

/** {row, type, index} at a point of a panel, or null. */
function find(panel, x, y) {
  const { box } = panel, rank = Math.floor((y - box.top) / box.pitch);
  if (rank < 0 || rank >= panel.entry.ranks || x < box.left || x > box.right) return null;
  const time = view.start + ((x - box.left) / box.plot) * (view.end - view.start);
  const row = rowsOf(panel.entry, panel.report)[rank], within = y - box.top - rank * box.pitch;
  if (box.memory && within > box.row + 1) return { row, type: "held", index: firstAbove(row.held.times, time) - 1, time };
  return at(row, time);
}

/** The action or wait of a rank at a time, or null. */
function at(row, time) {
  const n = firstAbove(row.starts, time) - 1;
  if (n >= 0 && row.ends[n] >= time) return { row, type: "action", index: n, time };
  const w = firstAbove(row.waits.starts, time) - 1;
  if (w >= 0 && row.waits.ends[w] >= time) return { row, type: "wait", index: w, time };
  const c = firstAbove(row.common.starts, time) - 1;
  if (c >= 0 && row.common.ends[c] >= time) return { row, type: "common", index: c, time };
  return null;
}

/** When something begins and ends. */
function timesOf({ row, type, index, time }) {
  if (type === "held") return [time, time];
  const from = { action: row, wait: row.waits, common: row.common }[type];
  return [from.starts[index], from.ends[index]];
}

/** What is before or after something on its rank, action or wait. */
function beside(item, step) {
  const [start, end] = timesOf(item), { row } = item, all = [];
  for (let n = 0; n < row.starts.length; n++) all.push([row.starts[n], row.ends[n], "action", n]);
  row.waits.starts.forEach((begin, n) => all.push([begin, row.waits.ends[n], "wait", n]));
  row.common.starts.forEach((begin, n) => all.push([begin, row.common.ends[n], "common", n]));
  all.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const here = all.findIndex(([a, b, type, n]) => a === start && b === end && type === item.type && n === item.index);
  const next = all[Math.max(0, Math.min(all.length - 1, here + step))];
  return { row, type: next[2], index: next[3], time: (next[0] + next[1]) / 2 };
}

/** Lines of text: a head, what it is, and the rest. */
function tell(panel, item) {
  const { row, type, index } = item, { entry } = panel;
  const [start, end] = timesOf(item);
  const text = (time) => timeText(entry, time);
  const when = `${text(start)} – ${text(end)}, takes ${text(end - start)}`;
  if (type === "held") {
    const count = index < 0 ? 0 : row.held.counts[index];
    return [`${count} held`, `stage inputs on rank ${row.rank}`, `at ${text(item.time)}; its peak is ${panel.report.peak[row.rank]}`];
  }
  if (type === "action") {
    const stage = row.stages[index], chunk = chunksOf(entry) > 1 ? ` · chunk ${entry.chunks[stage]}` : "";
    const lines = [nameOf(entry, row, index), DATA.kinds[KINDS[row.kinds[index]]]];
    lines.push(`rank ${row.rank} · stage ${stage}${chunk} · microbatch ${unitText(entry, row.microbatches[index])}`, when);
    if (row.joined.has(index)) lines.push(`overlaps with ${nameOf(entry, row, index + 1)}`);
    if (row.joined.has(index - 1)) lines.push(`overlaps with ${nameOf(entry, row, index - 1)}`);
    return lines;
  }
  if (type === "common") return ["shared", "by all ranks", `rank ${row.rank}`, when];
  const cause = CAUSES[row.waits.causes[index]], before = row.waits.before[index], behind = blamed(panel, item);
  const lines = [cause, "idle", `rank ${row.rank}: ${DATA.causes[cause]}`, when];
  if (behind) lines.push(`waits for ${nameOf(entry, behind.row, behind.index)} on rank ${behind.row.rank}`);
  if (before >= 0) lines.push(`before ${nameOf(entry, row, before)}`);
  return lines;
}

/** The action that a wait is for, or null. */
function blamed(panel, { row, type, index }) {
  const rank = type === "wait" ? row.waits.behindRank[index] : -1;
  if (rank < 0) return null;
  return { row: rowsOf(panel.entry, panel.report)[rank], type: "action", index: row.waits.behind[index] };
}

/** Outline it; for an action its microbatch everywhere, for a wait what it waits for. */
function paintOver(panel) {
  const { box, over, item } = panel, context = prepare(over, box.width, box.height);
  over.style.width = `${box.width}px`;
  if (!item || item.type === "held") return;
  const scale = box.plot / (view.end - view.start), colours = currentTheme();
  const x = (time) => box.left + (time - view.start) * scale;
  const y = (row) => box.top + row.rank * box.pitch;
  context.beginPath();
  context.rect(box.left, 0, box.plot, box.height);
  context.clip();
  const frame = (other, width) => {
    const [start, end] = timesOf(other);
    const shape = [x(start) - 0.5, y(other.row) - 0.5, Math.max(2, x(end) - x(start)), box.row + 1];
    for (const [colour, more] of [[colours.paper, 2.5], [colours.text, 0]]) {
      context.strokeStyle = colour;
      context.lineWidth = width + more;
      context.strokeRect(...shape);
    }
  };
  frame(item, 2.5);
  const cause = blamed(panel, item);
  if (cause) {
    frame(cause, 1.5);
    context.setLineDash([4, 3]);
    line(context, [x(timesOf(cause)[1]), y(cause.row) + box.row / 2, x(timesOf(item)[1]), y(item.row) + box.row / 2]);
  }
  if (item.type !== "action") return;
  const microbatch = item.row.microbatches[item.index];
  for (const row of rowsOf(panel.entry, panel.report)) {
    const first = firstAbove(row.ends, view.start), stop = firstAbove(row.starts, view.end);
    if (stop - first > box.plot / DENSE) continue;
    for (let n = first; n < stop; n++) {
      if (row.microbatches[n] === microbatch) frame({ row, type: "action", index: n }, 1.5);
    }
  }
}

/** Show the tooltip beside a point of the window, where there is room. */
function tip(lines, x, y) {
  const node = $("tip");
  node.hidden = !lines;
  if (!lines) return;
  const [head, what, ...rest] = lines;
  node.replaceChildren(
    make("p", {}, make("strong", { text: head }), " ", what),
    ...rest.map((text) => make("p", { text })),
  );
  const { width, height } = node.getBoundingClientRect();
  const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
  const top = y + 18 + height > innerHeight - 8 ? y - 14 - height : y + 18;
  node.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  node.style.top = `${Math.max(8, top)}px`;
}

function select(panel, item, x, y) {
  const same = panel.item && item && panel.item.row === item.row && panel.item.type === item.type && panel.item.index === item.index;
  panel.item = item;
  if (!same) paintOver(panel);
  tip(item && tell(panel, item), x, y);
}
