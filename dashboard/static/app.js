// The page: takes views (see dashboard/view.py) and writes them as text. No markup is ever built from data.

import { LossChart } from "./chart.js";
import { ago, bytes, count, duration, isNumber, loss, percent, plural, setHidden, setText } from "./format.js";
import { showPeers } from "./peers.js";
import { LiveView } from "./stream.js";

const ACTIVITY = {
  starting: "starting", joining: "joining", training: "training", alone: "training alone",
  paused: "paused", serving: "serving", stopping: "stopping", stopped: "stopped",
};
const SPEED_ROUNDS = 5;
const NOBODY = { id: "", label: "", snapshot: null, age_s: null, problem: "" };

const chart = new LossChart(document.getElementById("chart"));
let view = null;
let received = 0;
let connection = "waiting";
const shown = { history: null, spoken: null };
let fetching = false;

const sinceView = () => (performance.now() - received) / 1000;
const serverNow = () => view.now_unix_s + sinceView();
const ageOf = (source) => (isNumber(source.age_s) ? source.age_s + sinceView() : null);

// What the node does, or "stopped", "stale" (its status is old: it was killed, or nothing reaches this page) or "none".
function activityOf(source) {
  if (!source.snapshot) return "none";
  if (source.snapshot.activity === "stopped") return "stopped";
  return ageOf(source) > view.stale_after_s ? "stale" : source.snapshot.activity;
}

const activityName = (activity) =>
  ({ stale: connection === "lost" ? "no fresh status" : "not running", none: "no status" })[activity]
  ?? ACTIVITY[activity] ?? activity;
const runs = (source) => !["none", "stopped", "stale"].includes(activityOf(source));

function chosenSource() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("node");
  const byId = (id) => view.sources.find((source) => source.id === id);
  return byId(wanted) ?? byId(view.auto) ?? view.sources[0];
}

function problemOf(source) {
  if (connection === "lost" && sinceView() > view.stale_after_s) {
    return `The dashboard has not answered for ${duration(sinceView())}; these are its last figures.`;
  }
  const activity = activityOf(source);
  if (activity === "stopped") return `This node stopped ${ago(ageOf(source))}; these are its last figures.`;
  const stale = activity === "stale"
    ? `No fresh status for ${duration(ageOf(source))}. The node may be gone; these are its last figures.` : "";
  return [source.problem, stale].filter(Boolean).join(" ");
}

function lead(snapshot, activity) {
  const alive = snapshot.peers.filter((peer) => peer.alive && peer.role === "trainer").length;
  const here = {
    training: `${plural(alive, "peer")} training together`,
    alone: "One peer, training alone until others come",
    serving: `A seed, serving ${plural(alive, "training peer")}`,
  }[activity] ?? (activity === "stale" ? "This node does not report" : `This node is ${activityName(activity)}`);
  const model = `a model of ${count(snapshot.model.parameters)} parameters`;
  const reason = ["training", "alone", "serving", "stale"].includes(activity) ? "" : ` ${snapshot.reason}`;
  return `${here}: ${model}.${reason}`;
}

function showNodes(current) {
  const nav = document.getElementById("nodes");
  nav.hidden = view.sources.length < 2;
  const key = JSON.stringify([current.id, view.sources.map((source) => [source.id, source.label, source.fresh])]);
  if (nav.dataset.key === key) return;
  nav.dataset.key = key;
  nav.replaceChildren(...view.sources.map((source) => {
    const link = document.createElement("a");
    link.href = `#node=${encodeURIComponent(source.id)}`;
    link.textContent = source.label;
    link.classList.toggle("stale", !source.fresh);
    if (source.id === current.id) link.setAttribute("aria-current", "true");
    return link;
  }));
}

function showHero(source) {
  const snapshot = source.snapshot;
  setText("swarm-name", snapshot ? snapshot.swarm_name : "Waiting for a node");
  const activity = activityOf(source);
  setText("activity", activityName(activity));
  document.getElementById("activity").dataset.activity = activity;
  setText("lead", snapshot ? lead(snapshot, activity) : "The page fills in by itself as soon as a node writes its status.");
  const problem = problemOf(source);
  setText("problem", problem);
  setHidden("problem", !problem);
  document.title = snapshot ? `${snapshot.swarm_name} · tscale` : "tscale";
  const spoken = snapshot ? `${snapshot.swarm_name}: ${document.getElementById("activity").textContent}` : source.problem;
  if (spoken !== shown.spoken) setText("announce", spoken);
  shown.spoken = spoken;
}

function showWarnings(warnings) {
  const list = document.getElementById("warnings");
  list.hidden = warnings.length === 0;
  if (list.dataset.key === JSON.stringify(warnings)) return;
  list.dataset.key = JSON.stringify(warnings);
  list.replaceChildren(...warnings.map((warning) => {
    const item = document.createElement("li");
    item.textContent = warning;
    return item;
  }));
}

function showRound(round, runsNow) {
  setText("round-number", round.number);
  const left = round.ends_unix_s - serverNow();
  const over = !runsNow || left < -round.length_s;
  setText("round-left", over ? "–" : left > 0 ? `${duration(Math.ceil(left))} left` : "closing");
  const passed = over ? 0 : Math.min(1, Math.max(0, 1 - left / round.length_s));
  document.getElementById("round-bar").value = isNumber(passed) ? passed : 0;
  setText("round-sub", round.contributors > 0
    ? `round ${round.folded_round} took ${plural(round.contributors, "contribution")}` : "no round folded yet");
}

// The whole swarm's speed from what the last rounds folded; a node's own speed is only its own.
function swarmSpeed(snapshot) {
  const last = (snapshot.recent ?? []).slice(-SPEED_ROUNDS - 1);
  if (last.length < 2) return null;
  const [from, to] = [last[0], last[last.length - 1]];
  const seconds = (to.round - from.round) * snapshot.round.length_s;
  const speed = (to.tokens_total - from.tokens_total) / seconds;
  return seconds > 0 && speed >= 0 ? { speed, rounds: to.round - from.round } : null;
}

function showTiles(snapshot) {
  const { training, transfer } = snapshot;
  setText("loss", loss(training.loss_heldout));
  setText("loss-sub", `nats per byte · training ${loss(training.loss_train)}`);
  setText("tokens", count(training.tokens_total));
  setText("tokens-sub", `${count(training.tokens_local)} by this node`);
  const swarm = swarmSpeed(snapshot);
  setText("speed", count(swarm ? swarm.speed : training.tokens_per_s));
  setText("speed-sub", swarm
    ? `swarm, last ${plural(swarm.rounds, "round")} · this node ${count(training.tokens_per_s)}` : "this node, now");
  setText("bits", isNumber(transfer.bits_per_parameter) && transfer.contribution_bytes > 0
    ? transfer.bits_per_parameter.toFixed(3) : "–");
  setText("bits-sub", transfer.contribution_bytes > 0
    ? `${bytes(transfer.contribution_bytes)} sent a round, density ${transfer.rung}` : "nothing sent yet");
  setText("up", `${bytes(transfer.up_bytes)} (${bytes(transfer.up_bps / 8)}/s)`);
  setText("down", `${bytes(transfer.down_bytes)} (${bytes(transfer.down_bps / 8)}/s)`);
}

function showFacts(source) {
  const { node, model, round, training, credit, swarm_id: swarmId, updated_unix_s: updated } = source.snapshot;
  const facts = [
    ["Swarm", swarmId],
    ["Model", `${model.kind}, ${count(model.parameters)} parameters`],
    ["Seen from", `${source.label} (${node.role}, version ${node.version})`],
    ["Peer id", node.peer_id],
    runs(source) ? ["Running for", duration(serverNow() - node.started_unix_s)]
      : ["Ran for", duration(updated - node.started_unix_s)],
    ["Time spent training", training.utilisation === null ? "–" : percent(training.utilisation)],
    ["Trains on", training.device ? `${training.device}, ${training.precision}` : "–"],
    ["Contributions taken", `${count(credit.contributions_accepted)}, missed ${count(credit.contributions_missed)}`],
    ["Last contribution", credit.last_reason || (credit.contributions_accepted > 0 ? "taken" : "–")],
    ["Last manifest", round.head || "–"],
    ["State digest", round.state_digest || "–"],
  ];
  const list = document.getElementById("facts");
  if (list.childElementCount !== facts.length) {
    list.replaceChildren(...facts.map(() => {
      const row = document.createElement("div");
      row.append(document.createElement("dt"), document.createElement("dd"));
      return row;
    }));
  }
  facts.forEach((texts, i) => texts.forEach((text, part) => {
    const cell = list.children[i].children[part];
    if (cell.textContent !== text) cell.textContent = text;
  }));
}

async function refreshHistory(source) {
  const key = `${source.id}:${source.history_rev}`;
  if (fetching || key === shown.history) return;
  fetching = true;
  try {
    const answer = await fetch(`/history.json?node=${encodeURIComponent(source.id)}`);
    if (!answer.ok) return;
    const history = await answer.json();
    chart.show(history);
    showHistoryTable(history);
    shown.history = key;
  } catch {
    // the next view tries again
  } finally {
    fetching = false;
  }
}

function showHistoryTable(history) {
  document.getElementById("history").replaceChildren(...history.slice(-12).reverse().map((point) => {
    const row = document.createElement("tr");
    for (const text of [point.round, count(point.tokens_total), loss(point.loss_heldout), loss(point.loss_train)]) {
      row.insertCell().textContent = text;
    }
    return row;
  }));
}

// "live" is said of a node that runs, not of the connection to a page about one that ended.
function showLive(source) {
  const state = connection === "live" && source?.snapshot && !runs(source) ? "ended" : connection;
  const live = document.getElementById("live");
  live.dataset.connection = connection;
  live.dataset.state = state;
  setText("live-text", { live: "live", ended: "not live", lost: "reconnecting", waiting: "connecting" }[state]);
}

function show() {
  if (!view) return showLive(null);
  const source = chosenSource() ?? NOBODY;
  showLive(source);
  showNodes(source);
  showHero(source);
  setHidden("run", !source.snapshot);
  if (!source.snapshot) return showWarnings([]);
  showWarnings(source.snapshot.warnings);
  showRound(source.snapshot.round, runs(source));
  showTiles(source.snapshot);
  showPeers(source.snapshot.peers, ageOf(source), runs(source) ? "" : activityName(activityOf(source)));
  showFacts(source);
  return refreshHistory(source);
}

window.addEventListener("hashchange", show);
setInterval(show, 500);
new LiveView(
  (next) => {
    view = next;
    received = performance.now();
    show();
  },
  (state) => {
    connection = state;
    if (state === "live") shown.history = null; // a restarted server counts its revisions anew
    show();
  },
);
