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

// What is known of a peer once this node has ended is how it was then.
function stateOf(peer, ended) {
  if (!ended) return peer.alive ? "alive" : "gone";
  return peer.this_node ? ended : peer.alive ? "was alive" : "gone";
}

function fill(row, peer, now, most) {
  const [name, id, role, state, seen, version, tokens] = row.cells;
  const alive = peer.alive && !now.ended;
  row.classList.toggle("gone", !alive);
  put(name.firstChild, peer.name || "unnamed");
  name.firstChild.classList.toggle("unnamed", !peer.name);
  name.lastChild.hidden = !peer.this_node;
  put(id.firstChild, shortId(peer.peer_id));
  id.firstChild.title = peer.peer_id;
  put(role, peer.role);
  state.firstChild.dataset.alive = alive;
  put(state.lastChild, stateOf(peer, now.ended));
  const seen_s = peer.this_node ? 0 : peer.last_seen_s;
  put(seen, peer.this_node && !now.ended ? "now" : isNumber(seen_s) ? ago(seen_s + now.age) : "–");
  put(version, peer.version || "–");
  put(tokens.lastChild, peer.role === "seed" && peer.tokens === 0 ? "–" : count(peer.tokens));
  tokens.firstChild.firstChild.style.width = `${most > 0 ? (100 * peer.tokens) / most : 0}%`;
  tokens.firstChild.hidden = peer.tokens === 0;
}

// `age` is how old the snapshot is, in seconds: "last seen" counts on from it. `ended` says why this node does not run,
// or is empty.
export function showPeers(peers, age, ended) {
  const body = document.getElementById("peers");
  const sorted = [...peers].sort(order);
  const most = Math.max(0, ...sorted.map((peer) => peer.tokens));
  while (body.rows.length > sorted.length) body.lastElementChild.remove();
  while (body.rows.length < sorted.length) body.append(newRow());
  sorted.forEach((peer, i) => fill(body.rows[i], peer, { age: age ?? 0, ended }, most));
  const alive = sorted.filter((peer) => peer.alive).length;
  const known = `${alive} alive of ${plural(sorted.length, "peer")} known${ended ? " at its last report" : ""}`;
  setText("peers-sub", sorted.length ? known : "");
  setHidden("peers-none", sorted.length > 0);
}
