// What the page was given: schedules, each with the reports of one or several clocks.
// Columns of numbers travel as base64 of little-endian arrays and are read when first shown.

const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = Object.keys(DATA.kinds);
const CAUSES = Object.keys(DATA.causes);
const F = KINDS.indexOf("F"), B = KINDS.indexOf("B"), W = KINDS.indexOf("W");

function bytes(text) {
  const raw = atob(text), result = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) result[n] = raw.charCodeAt(n);
  return result;
}
const floats = (text) => new Float64Array(bytes(text).buffer);
const integers = (text) => new Int32Array(bytes(text).buffer);

/** The orders of a schedule: for each rank columns of kind, stage and unit (a microbatch, or a slice). */
function ordersOf(entry) {
  entry.read ??= entry.orders.map((order) => ({
    kinds: bytes(order.kinds),
    stages: integers(order.stages),
    microbatches: integers(order.microbatches),
  }));
  return entry.read;
}

/** The rows of a report: an order, its times, its waits and what it holds in memory. */
function rowsOf(entry, report) {
  const [starts = new Float64Array(), ends = new Float64Array()] = report.common.map(floats);
  const common = { starts, ends };
  report.read ??= ordersOf(entry).map((order, rank) => {
    const starts = floats(report.starts[rank]), ends = floats(report.ends[rank]);
    const waits = report.waits[rank];
    return {
      ...order,
      rank,
      starts,
      ends,
      joined: new Set(report.joined[rank]),
      waits: {
        starts: floats(waits.starts),
        ends: floats(waits.ends),
        causes: bytes(waits.causes),
        before: integers(waits.before),
        behindRank: integers(waits.behind_rank),
        behind: integers(waits.behind),
      },
      common,
      held: heldBy(order.kinds, starts, ends),
    };
  });
  return report.read;
}

/** Stage inputs held over time: from the start of F to the end of B or W, or of F alone. */
function heldBy(kinds, starts, ends) {
  const forward = !kinds.some((kind) => kind !== F);
  const times = [], counts = [];
  let count = 0;
  const change = (time, by) => {
    count += by;
    times.push(time);
    counts.push(count);
  };
  for (let n = 0; n < kinds.length; n++) {
    if (kinds[n] === F) change(starts[n], 1);
    if (forward || kinds[n] === B || kinds[n] === W) change(ends[n], -1);
  }
  return { times: Float64Array.from(times), counts: Int32Array.from(counts) };
}

/** Labels are of one form per panel, which the shortest action that takes time decides. */
function shortest(entry, report) {
  if (report.shortest === undefined) {
    let least = Infinity;
    for (const { starts, ends } of rowsOf(entry, report)) {
      for (let n = 0; n < starts.length; n++) {
        const lasts = ends[n] - starts[n];
        if (lasts > report.makespan * 1e-12 && lasts < least) least = lasts;
      }
    }
    report.shortest = least;
  }
  return report.shortest;
}

/** The first index whose value is greater; values ascend. */
function firstAbove(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

const chunksOf = (entry) => entry.stages / entry.ranks;

/** What an action works on: a microbatch, or "3.1" for a slice of microbatch 3. */
function unitText(entry, unit) {
  const { slices } = entry;
  return slices ? `${Math.floor(unit / slices)}.${unit % slices}` : `${unit}`;
}

function nameOf(entry, row, n) {
  return `${row.stages[n]}${KINDS[row.kinds[n]]}${unitText(entry, row.microbatches[n])}`;
}
