// The loss curve: held-out and training loss over tokens, redrawn when a round was folded.

import { count, isNumber, loss, plural, setText } from "./format.js";

// Sorted by tokens, one point for each token count: a fork or a restart may leave two, the later one counts.
export function columns(history) {
  const byTokens = new Map();
  for (const point of history) {
    if (isNumber(point.tokens_total)) byTokens.set(point.tokens_total, point);
  }
  const points = [...byTokens.values()].sort((a, b) => a.tokens_total - b.tokens_total);
  const value = (x) => (isNumber(x) ? x : null);
  return {
    points,
    data: [
      points.map((p) => p.tokens_total),
      points.map((p) => value(p.loss_train)),
      points.map((p) => value(p.loss_heldout)),
    ],
  };
}

export function words(points) {
  const held = points.filter((p) => isNumber(p.loss_heldout));
  if (held.length === 0) return "No held-out loss has been measured yet, so there is no curve.";
  const [first, last] = [held[0], held[held.length - 1]];
  if (held.length === 1) return `Held-out loss ${loss(first.loss_heldout)} nats per byte, measured once so far.`;
  const verb = last.loss_heldout < first.loss_heldout ? "fell" : "went";
  return `Held-out loss ${verb} from ${loss(first.loss_heldout)} to ${loss(last.loss_heldout)} nats per byte `
    + `over ${count(last.tokens_total - first.tokens_total)} tokens, rounds ${first.round} to ${last.round}.`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class LossChart {
  constructor(element) {
    this.element = element;
    this.plot = null;
    this.data = [[], [], []];
    new ResizeObserver(() => this.resize()).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  show(history) {
    const { points, data } = columns(history);
    this.data = data;
    this.element.classList.toggle("empty", points.length < 2);
    setText("chart-words", words(points));
    if (this.plot) this.plot.setData(data);
    else this.rebuild();
    this.readout(null);
  }

  size() {
    const width = Math.max(200, this.element.clientWidth);
    return { width, height: width < 560 ? 220 : 300 };
  }

  resize() {
    if (this.plot && this.plot.width !== this.size().width) this.plot.setSize(this.size());
  }

  rebuild() {
    if (this.plot) this.plot.destroy();
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const line = (label, stroke, width) => ({
      label, stroke, width, spanGaps: true, points: { show: this.data[0].length < 12, size: 5, fill: stroke },
    });
    const options = {
      ...this.size(),
      padding: [8, 14, 0, 0],
      legend: { show: false },
      scales: { x: { time: false } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map(count), space: 70, size: 30, grid: { show: false } },
        { ...axis, size: 46, values: (_, ticks) => ticks.map((t) => t.toFixed(2)) },
      ],
      series: [
        {},
        line("training", colour("--train"), 1.5),
        { ...line("held-out", colour("--heldout"), 2.5), fill: colour("--heldout-soft") },
      ],
      cursor: { drag: { x: false, y: false }, points: { size: 8 }, y: false },
      hooks: { setCursor: [(plot) => this.readout(plot.cursor.idx)] },
    };
    this.plot = new uPlot(options, this.data, this.element);
  }

  // The figures under the pointer, or the newest ones when there is none.
  readout(index) {
    const newest = (column) => column.findLast((value) => value !== null);
    const [tokens, train, heldout] = this.data;
    const at = isNumber(index);
    setText("read-train", loss(at ? train[index] : newest(train)));
    setText("read-heldout", loss(at ? heldout[index] : newest(heldout)));
    setText("read-at", at ? `at ${plural(tokens[index], "token")}` : "");
  }
}
