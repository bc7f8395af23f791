// The table of peers. Names come from strangers: they are only ever written as text, in a <bdi> of their own.

import { ago, count, isNumber, plural, setHidden, setText, shortId } from "./format.js";

const LABELS = ["Name", "Peer id", "Role", "State", "Last seen", "Version", "Tokens given"];

// This node first, then the living, then who gave most.
function order(a, b) {
  return (b.this_node - a.this_node) || (b.alive - a.alive) || (b.tokens - a.tokens) || (a.peer_id < b.peer_id ? -1 : 1);
}

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function newRow() {
  const row = document.createElement("tr");
  row.setAttribute("role", "row");
  LABELS.forEach((label, i) => {
    const cell = document.createElement(i === 0 ? "th" : "td");
    cell.setAttribute("role", i === 0 ? "rowheader" : "cell");
    if (i === 0) cell.scope = "row";
    cell.dataset.label = label;
    row.append(cell);
  });
  row.cells[0].append(element("bdi", "name"), element("span", "me", "this node"));
  row.cells[1].append(element("code"));
  row.cells[3].append(element("span", "dot"), element("span"));
  row.cells[3].firstChild.setAttribute("aria-hidden", "true");
  row.cells[6].className = "right";
  row.cells[6].append(element("span", "share"), element("span"));
  row.cells[6].firstChild.append(element("span", "fill"));
  row.cells[6].firstChild.setAttribute("aria-hidden", "true");
  return row;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function fill(row, peer, age, most) {
  const [name, id, role, state, seen, version, tokens] = row.cells;
  row.classList.toggle("gone", !peer.alive);
  put(name.firstChild, peer.name || "unnamed");
  name.firstChild.classList.toggle("unnamed", !peer.name);
  name.lastChild.hidden = !peer.this_node;
  put(id.firstChild, shortId(peer.peer_id));
  id.firstChild.title = peer.peer_id;
  put(role, peer.role);
  state.firstChild.dataset.alive = peer.alive;
  put(state.lastChild, peer.alive ? "alive" : "gone");
  put(seen, peer.this_node ? "now" : isNumber(peer.last_seen_s) ? ago(peer.last_seen_s + (age ?? 0)) : "–");
  put(version, peer.version || "–");
  put(tokens.lastChild, peer.role === "seed" && peer.tokens === 0 ? "–" : count(peer.tokens));
  tokens.firstChild.firstChild.style.width = `${most > 0 ? (100 * peer.tokens) / most : 0}%`;
  tokens.firstChild.hidden = peer.tokens === 0;
}

// `age` is how old the snapshot is, in seconds: "last seen" counts on from it.
export function showPeers(peers, age) {
  const body = document.getElementById("peers");
  const sorted = [...peers].sort(order);
  const most = Math.max(0, ...sorted.map((peer) => peer.tokens));
  while (body.rows.length > sorted.length) body.lastElementChild.remove();
  while (body.rows.length < sorted.length) body.append(newRow());
  sorted.forEach((peer, i) => fill(body.rows[i], peer, age, most));
  const alive = sorted.filter((peer) => peer.alive).length;
  setText("peers-sub", sorted.length ? `${alive} alive of ${plural(sorted.length, "peer")} known` : "");
  setHidden("peers-none", sorted.length > 0);
}
