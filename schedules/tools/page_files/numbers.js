// The numbers: figures above each timeline, shares by cause, and a table of the ranks.

/** An element; strings become text, never markup. */
function make(tag, { text, ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}
const $ = (id) => document.getElementById(id);
const sum = (values) => values.reduce((a, b) => a + b, 0);

function figures(panel, reference) {
  const { report } = panel, peak = Math.max(...report.peak);
  const change = reference && reference.report.makespan ? report.makespan / reference.report.makespan - 1 : 0;
  const against = change ? signed(`${(100 * change).toFixed(1)}%`.replace("-", "−"), change) : "";
  const rows = [
    ["Makespan", timeText(panel.entry, report.makespan), against && `${against} against A`],
    ["Bubble of the step", percent(report.step_bubble), ""],
    ["Idle in the longest span", percent(report.bubble), ""],
    ["Peak activations", number(peak), peak && panel.entry.ranks > 1 ? `rank ${report.peak.indexOf(peak)}` : ""],
  ];
  panel.figures.replaceChildren(
    ...rows.map(([name, value, more]) => {
      const shown = make("dd", { text: value });
      if (more) shown.append(" ", make("small", { text: more }));
      return make("div", {}, make("dt", { text: name }), shown);
    }),
  );
}

const titleOf = (panel) => `${panel.entry.label}, ${panel.report.label}`;

/** Shares of all ranks' time, panels side by side. */
function sharesTable(panels) {
  const whole = (panel) => panel.report.makespan * panel.entry.ranks || 1;
  const two = panels.length > 1;
  const head = (text, more) => make("th", { scope: "col", text, ...more });
  const heads = [head(""), ...panels.flatMap(() => [head("share"), head("time")]), ...(two ? [head("time")] : [])];
  const groups = panels.map((panel) => head(`${panel.letter}: ${titleOf(panel)}`, { scope: "colgroup", colspan: 2 }));
  const above = two ? [make("tr", {}, make("td"), ...groups, head("B − A", { scope: "colgroup", colspan: 1 }))] : [];
  const line = (name, times, bold) => {
    const cells = panels.flatMap((panel, n) => [percent(times[n] / whole(panel)), timeText(panel.entry, times[n])]);
    if (two) cells.push(signed(timeText(panels[0].entry, times[1] - times[0]), times[1] - times[0]));
    const row = make("tr", bold ? { class: "sum" } : {}, make("th", { scope: "row", text: name }));
    row.append(...cells.map((text) => make("td", { text })));
    return row;
  };
  const rows = [line("work", panels.map((panel) => sum(panel.report.work)))];
  CAUSES.forEach((cause, n) => {
    const times = panels.map((panel) => sum(panel.report.parts.map((part) => part[n])));
    if (times.some((time) => time > 0)) rows.push(line(cause, times));
  });
  rows.push(line("all ranks’ time", panels.map((panel) => panel.report.makespan * panel.entry.ranks), true));
  $("shares").replaceChildren(
    make("thead", {}, ...above, make("tr", {}, ...heads)),
    make("tbody", {}, ...rows),
  );
}

/** One table per panel, a row per rank. */
function rankTables(panels) {
  const tables = panels.map((panel) => {
    const { report } = panel, whole = report.makespan || 1;
    const used = CAUSES.map((_, n) => n).filter((n) => report.parts.some((part) => part[n] > 0));
    const heads = ["rank", "peak", "span", "work", "", ...used.map((n) => CAUSES[n]), "idle"];
    const rows = report.work.map((work, rank) => {
      const parts = report.parts[rank], bar = make("canvas", { "aria-hidden": "true" });
      bars.push({ bar, work: work / whole, parts: parts.map((part) => part / whole) });
      const row = make("tr", {}, make("th", { scope: "row", text: `rank ${rank}` }));
      const cell = (text) => make("td", { text });
      const share = (time) => (time > 0 ? cell(percent(time / whole)) : make("td", { class: "none", text: "–" }));
      row.append(cell(number(report.peak[rank])), cell(timeText(panel.entry, report.span[rank])), share(work), make("td", {}, bar));
      row.append(...used.map((n) => share(parts[n])), share(sum(parts)));
      return row;
    });
    const name = panels.length > 1 ? `${panel.letter}: ${titleOf(panel)}` : titleOf(panel);
    const table = make("table", {}, make("caption", { text: name }));
    table.append(
      make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", text })))),
      make("tbody", {}, ...rows),
    );
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Ranks of ${name}` }, table);
  });
  $("tables").replaceChildren(...tables);
}
let bars = []; // of the tables, to be painted

/** A rank's step as one bar: work, then its waits by cause. */
function paintBars() {
  const colours = currentTheme();
  for (const { bar, work, parts } of bars) {
    const width = bar.clientWidth || 240, context = prepare(bar, width, 14);
    context.fillStyle = colours.idle;
    context.fillRect(0, 0, width, 14);
    context.fillStyle = colours.muted;
    context.fillRect(0, 0, width * work, 14);
    let at = width * work;
    parts.forEach((part, n) => {
      const pattern = causeTexture(context, CAUSES[n]);
      if (pattern) {
        context.fillStyle = pattern;
        context.fillRect(at, 0, width * part, 14);
      }
      at += width * part;
      context.fillStyle = colours.paper;
      if (part > 0) context.fillRect(at - 0.5, 0, 1, 14);
    });
  }
}

/** What occurs in the panels shown: kinds, chunks, causes. */
function legend(panels) {
  const colours = currentTheme(), items = [];
  const swatch = (text, draw) => {
    const canvas = make("canvas", { "aria-hidden": "true" }), context = prepare(canvas, 22, 14);
    draw(context);
    items.push(make("li", {}, canvas, text));
  };
  const fill = (context, style) => {
    if (!style) return;
    context.fillStyle = style;
    context.fillRect(0, 0, 22, 14);
  };
  for (const kind of KINDS.filter((k) => panels.some((panel) => panel.entry.kinds.includes(k)))) {
    swatch(DATA.kinds[kind], (context) => {
      fill(context, colours.fill[kind]);
      label(context, kind, { middle: 11, y: 7.5, colour: colours.ink[kind] });
    });
  }
  const chunks = Math.max(...panels.map((panel) => chunksOf(panel.entry)));
  for (let chunk = 1; chunk < Math.min(chunks, CHUNK_STROKES.length); chunk++) {
    swatch(`chunk ${chunk}`, (context) => {
      fill(context, colours.fill.F);
      fill(context, chunkTexture(context, "F", chunk));
    });
  }
  if (panels.some((panel) => panel.report.joined.some((row) => row.length))) {
    swatch("overlapped pair", (context) => {
      context.strokeStyle = colours.text;
      context.lineWidth = 1.5;
      context.strokeRect(1, 1, 20, 12);
    });
  }
  CAUSES.forEach((cause, n) => {
    if (!panels.some((panel) => panel.report.parts.some((part) => part[n] > 0))) return;
    swatch(cause, (context) => {
      fill(context, colours.idle);
      fill(context, causeTexture(context, cause));
    });
  });
  $("legend").replaceChildren(...items);
}
