// A row whose boxes are too narrow to see: columns of pixels, filled from below with the share of
// each kind in their time. Sums over any stretch come from running totals, so that a row costs as
// much as it is wide, however many actions it has.

const COLUMN = 2; // pixels

/** Time worked in each kind from 0 on, at the edges of equal bins of the makespan. */
function totalsOf(row, makespan) {
  if (row.totals) return row.totals;
  const bins = 2 ** Math.ceil(Math.log2(Math.max(64, row.starts.length))), scale = bins / makespan;
  const totals = KINDS.map(() => new Float64Array(bins + 1));
  for (let n = 0; n < row.starts.length; n++) {
    const from = row.starts[n] * scale, to = Math.min(bins, row.ends[n] * scale), mine = totals[row.kinds[n]];
    for (let bin = Math.floor(from); bin < to; bin++) {
      mine[bin + 1] += Math.min(to, bin + 1) - Math.max(from, bin);
    }
  }
  for (const mine of totals) for (let bin = 0; bin < bins; bin++) mine[bin + 1] += mine[bin];
  row.totals = totals;
  return totals;
}

/** The share of each kind, or none, in every column. */
function sharesOf(row, makespan, box) {
  const count = Math.ceil(box.plot / COLUMN);
  return totalsOf(row, makespan).map((totals) => {
    const bins = totals.length - 1, step = ((view.end - view.start) / box.plot) * COLUMN * (bins / makespan);
    const until = (bin) => {
      const at = Math.max(0, Math.min(bins, bin)), low = Math.min(bins - 1, Math.floor(at));
      return totals[low] + (at - low) * (totals[low + 1] - totals[low]);
    };
    const shares = new Float32Array(count);
    let before = until((view.start / makespan) * bins);
    for (let column = 0; column < count; column++) {
      const after = until((view.start / makespan) * bins + (column + 1) * step);
      shares[column] = (after - before) / step;
      before = after;
    }
    return shares;
  });
}

function paintDense({ context, box, colours, panel }, row, y) {
  const shares = sharesOf(row, panel.report.makespan, box), count = shares[0].length;
  const busy = Float32Array.from(shares[0], (_, c) => (shares.some((mine) => mine[c] > 1e-6) ? 1 : 0));
  const near = blur(busy); // means are taken over columns with work, so that its ends stay sharp
  const level = new Float32Array(count);
  KINDS.forEach((kind, k) => {
    if (!shares[k].some((share) => share > 0)) return;
    const smooth = blur(shares[k]);
    context.fillStyle = colours.fill[kind];
    let from = 0, low = 0, high = 0;
    for (let column = 0; column <= count; column++) {
      const base = column < count ? level[column] : 0;
      const top = base + (column < count && busy[column] ? (smooth[column] / near[column]) * box.row : 0);
      const same = column < count && Math.abs(base - low) < 0.3 && Math.abs(top - high) < 0.3;
      if (!same) {
        if (high > low) context.fillRect(box.left + from * COLUMN, y + box.row - high, (column - from) * COLUMN, high - low);
        [from, low, high] = [column, base, top];
      }
      if (column < count) level[column] = high;
    }
  });
}

/** Means of neighbours, twice: without them actions about as wide as a column would flicker. */
function blur(values, reach = 2, again = true) {
  const result = new Float32Array(values.length);
  let total = 0;
  for (let n = -reach; n < values.length; n++) {
    if (n + reach < values.length) total += values[n + reach];
    if (n > reach) total -= values[n - reach - 1];
    if (n >= 0) result[n] = Math.max(0, total) / (2 * reach + 1);
  }
  return again ? blur(result, reach, false) : result;
}
