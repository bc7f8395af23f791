// Numbers, times and names in words. Every function takes whatever the snapshot holds and returns plain text.

const NOTHING = "–";

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// 4359285 -> "4.36M"; whole numbers below 10,000 are written out.
export function count(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) {
      const scaled = value / (unit === "k" ? 1e3 : limit);
      return scaled.toFixed(Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2) + unit;
    }
  }
  return value.toLocaleString("en", { maximumFractionDigits: size < 10 && !Number.isInteger(value) ? 1 : 0 });
}

// Decimal units, as disks and lines are sold: 41812441 -> "41.8 MB".
export function bytes(value) {
  if (!isNumber(value)) return NOTHING;
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= limit) return (value / limit).toFixed(value / limit >= 100 ? 0 : 1) + " " + unit;
  }
  return Math.round(value) + " B";
}

export function loss(value) {
  return isNumber(value) ? value.toFixed(3) : NOTHING;
}

// 83 -> "1 min 23 s"; below a minute whole seconds, above two hours no seconds or minutes to spare.
export function duration(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return s % 60 && s < 600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
}

export function ago(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  return seconds < 3 ? "now" : `${duration(seconds)} ago`;
}

export function percent(share) {
  return isNumber(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : NOTHING;
}

// All Ed25519 peer ids start alike ("12D3KooW"), so the end is what tells them apart.
export function shortId(peerId) {
  const id = String(peerId ?? "");
  return id.length > 12 ? `…${id.slice(-8)}` : id || NOTHING;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

// Sets text without touching the node when nothing changed, so that a reader's selection survives.
export function setText(id, text) {
  const node = document.getElementById(id);
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

export function setHidden(id, hidden) {
  document.getElementById(id).hidden = hidden;
}
