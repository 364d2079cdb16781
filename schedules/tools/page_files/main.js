// Panels, switches, and when to draw.

const panels = ["A", "B"].map((letter) => {
  const root = $("panel").content.firstElementChild.cloneNode(true);
  const part = (query) => root.querySelector(query);
  $("panels").append(root);
  return {
    letter, root, canvas: part(".timeline"), over: part(".over"), figures: part(".figures"),
    chooser: part("select"), clocks: part(".segments"), badge: part(".badge"), note: part(".note"),
    entry: null, report: null, box: null, item: null,
  };
});
const shown = () => panels.filter((panel) => !panel.root.hidden);

/** Let a panel show a schedule, under a clock if that was timed. */
function choose(panel, index, clock) {
  panel.entry = DATA.entries[index];
  const { reports } = panel.entry;
  panel.report = reports.find((report) => report.label === clock) ??
    reports.find((report) => report.clock === panel.report?.clock) ?? reports[0];
  panel.chooser.value = String(index);
  panel.note.textContent = panel.entry.note;
  panel.clocks.replaceChildren(
    ...reports.map((report) => {
      const input = make("input", { type: "radio", name: `clock-${panel.letter}`, value: report.label });
      input.checked = report === panel.report;
      input.addEventListener("change", () => {
        panel.report = report;
        refresh();
      });
      return make("label", {}, input, make("span", { text: report.label }));
    }),
  );
}

/** Everything but the view has changed: the numbers, the legend, the axis. */
function refresh() {
  const two = $("compare").checked;
  panels[1].root.hidden = !two;
  span(shown().map((panel) => panel.report));
  panels.forEach((panel, n) => {
    panel.badge.textContent = two ? panel.letter : "";
    panel.item = null;
    figures(panel, n ? panels[0] : null);
    const { entry, report } = panel;
    panel.canvas.setAttribute(
      "aria-label",
      `${entry.label}, ${report.label} clock: ${entry.ranks} ranks, makespan ${timeText(entry, report.makespan)}. ` +
        "Shift and arrow keys go through actions and waits.",
    );
  });
  bars = [];
  sharesTable(shown());
  rankTables(shown());
  restyle();
}

/** Colours or sizes have changed. */
function restyle() {
  theme = null;
  legend(shown());
  paintBars();
  invalidate();
}

let pending = 0;
function invalidate() {
  pending ||= requestAnimationFrame(draw);
}

const PRINTED = 1040; // pixels across a printed page, so that text keeps its size

function draw() {
  cancelAnimationFrame(pending);
  pending = 0;
  const printing = document.documentElement.classList.contains("printing");
  for (const panel of shown()) {
    const width = printing ? PRINTED : panel.canvas.parentElement.clientWidth;
    const { left, plot, top, pitch, row } = (panel.box = layOut(panel.entry, width));
    paint(panel, prepare(panel.canvas, width, panel.box.height), panel.box);
    if (!panel.report.makespan) sayNothing(panel);
    paintOver(panel);
    Object.assign(panel.canvas.dataset, { width, left, plot, top, pitch, row });
  }
  paintOverview(shown());
  const whole = view.start === 0 && view.end === view.whole;
  const digits = 10 ** Math.floor(Math.log10((view.end - view.start) / 500));
  const { entry } = panels[0];
  const rounded = (time) => timeText(entry, whole ? time : Math.round(time / digits) * digits);
  $("range").textContent = `${rounded(view.start)} – ${rounded(view.end)}${whole ? "" : ` of ${timeText(entry, view.whole)}`}`;
  Object.assign($("range").dataset, { start: view.start, end: view.end });
}

/** A schedule whose actions all take no time. */
function sayNothing({ canvas, box }) {
  const context = canvas.getContext("2d"), colours = currentTheme();
  label(context, "Every action takes no time: there is nothing to draw to scale.", {
    middle: box.left + box.plot / 2, y: box.bottom / 2, colour: colours.text, rim: colours.paper,
  });
}

function print(yes) {
  document.documentElement.classList.toggle("printing", yes);
  restyle();
  draw();
}

function begin() {
  const several = DATA.entries.length > 1;
  panels.forEach((panel, n) => {
    panel.chooser.replaceChildren(...DATA.entries.map((entry, i) => make("option", { value: i, text: entry.label })));
    panel.chooser.disabled = !several;
    panel.chooser.setAttribute("aria-label", `Schedule ${panel.letter}`);
    panel.chooser.addEventListener("change", () => {
      choose(panel, Number(panel.chooser.value));
      refresh();
    });
    // One schedule is compared with itself under another clock.
    choose(panel, several ? n : 0, several ? undefined : DATA.entries[0].reports.at(n ? 1 : 0)?.label);
    listen(panel);
  });
  $("compare").checked = several;
  $("compare").addEventListener("change", refresh);
  $("memory").addEventListener("change", invalidate);
  $("in").addEventListener("click", () => zoom(1.6));
  $("out").addEventListener("click", () => zoom(1 / 1.6));
  $("fit").addEventListener("click", () => glideTo(0, view.whole));
  listenToOverview();
  dark.addEventListener("change", restyle);
  addEventListener("scroll", () => tip(null), { passive: true });
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  document.querySelector("main").hidden = false;
  refresh();
  openNarrow(panels[0]);
  let width = 0;
  new ResizeObserver(() => {
    if (width !== (width = document.body.clientWidth)) restyle();
  }).observe(document.body);
}
begin();
