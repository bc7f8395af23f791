"""Prometheus metrics, made from the same snapshots as the page."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tscale.dashboard.source import SourceState
from tscale.protocol.status import ACTIVITIES, StatusSnapshot

# peer names are strangers' text and never become labels
_LABELS = ("swarm", "peer")
_HEX_CHARS = 16


def render_metrics(states: tuple[SourceState, ...]) -> bytes:
    """The Prometheus text format for every node that has a snapshot, labelled by swarm id and the node's peer id."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots(states))
    return generate_latest(registry)


class _Snapshots(Collector):
    def __init__(self, states: tuple[SourceState, ...]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        seen: set[tuple[str, str]] = set()
        for state in self._states:
            snapshot = state.snapshot
            if snapshot is None or (snapshot.swarm_id, snapshot.node.peer_id) in seen:
                continue
            seen.add((snapshot.swarm_id, snapshot.node.peer_id))
            for sample in (*_health(state, snapshot), *_numbers(snapshot), *_counters(snapshot)):
                sample.add_to(families, (snapshot.swarm_id, snapshot.node.peer_id))
        yield from families.values()


class _Sample:
    """One value of one metric; `more` are labels beside swarm and peer."""

    def __init__(self, name: str, about: str, value: float | None, **more: str) -> None:
        self.name, self.about, self.value, self.more = name, about, value, more

    def add_to(self, families: dict[str, Metric], node: tuple[str, str]) -> None:
        if self.value is None:
            return
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = families.get(self.name)
        if not isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
            family = families[self.name] = kind(self.name, self.about, labels=(*_LABELS, *self.more))
        family.add_metric((*node, *self.more.values()), self.value)


def _health(state: SourceState, snapshot: StatusSnapshot) -> Iterator[_Sample]:
    yield _Sample("tscale_status_fresh", "1 while a running node keeps its status up to date", float(state.fresh))
    yield _Sample("tscale_status_age_seconds", "Age of the status snapshot", state.age_s)
    yield _Sample("tscale_warnings", "Warnings the node shows", len(snapshot.warnings))
    node = snapshot.node
    yield _Sample("tscale_node_info", "Version and role", 1, version=node.version[: _HEX_CHARS * 2], role=node.role)
    for activity in ACTIVITIES:
        value = float(activity == snapshot.activity)
        yield _Sample("tscale_activity", "1 for what the node is doing", value, activity=activity)


def _numbers(snapshot: StatusSnapshot) -> Iterator[_Sample]:
    round_, training, transfer = snapshot.round, snapshot.training, snapshot.transfer
    yield _Sample("tscale_round", "Number of the running round", round_.number)
    yield _Sample("tscale_round_folded", "Number of the last folded round", round_.folded_round)
    yield _Sample("tscale_round_ends_timestamp_seconds", "When the running round closes, unix time", round_.ends_unix_s)
    yield _Sample("tscale_round_contributors", "Contributions in the last folded round", round_.contributors)
    yield _Sample("tscale_tokens_per_second", "Training speed of this node", training.tokens_per_s)
    yield _Sample("tscale_utilisation_ratio", "Share of time spent in training steps", training.utilisation)
    yield _Sample("tscale_loss_nats", "Loss in nats per token", training.loss_train, split="train")
    yield _Sample("tscale_loss_nats", "Loss in nats per token", training.loss_heldout, split="heldout")
    for alive, state in ((True, "alive"), (False, "gone")):
        count = sum(peer.alive is alive for peer in snapshot.peers)
        yield _Sample("tscale_peers", "Peers this node knows", count, state=state)
    yield _Sample("tscale_contribution_bytes", "Size of the last contribution", transfer.contribution_bytes)
    yield _Sample("tscale_bits_per_parameter", "Bits a parameter of the last contribution", transfer.bits_per_parameter)
    yield _Sample("tscale_model_parameters", "Parameters of the model", snapshot.model.parameters)


def _counters(snapshot: StatusSnapshot) -> Iterator[_Sample]:
    training, transfer, credit, screen = snapshot.training, snapshot.transfer, snapshot.credit, snapshot.screen
    yield _Sample("tscale_swarm_tokens_total", "Tokens the whole swarm has folded", training.tokens_total)
    yield _Sample("tscale_node_tokens_total", "Tokens this node has trained on", training.tokens_local)
    yield _Sample("tscale_steps_total", "Inner steps of this node", training.steps)
    yield _Sample("tscale_transfer_bytes_total", "Bytes sent and received", transfer.up_bytes, direction="up")
    yield _Sample("tscale_transfer_bytes_total", "Bytes sent and received", transfer.down_bytes, direction="down")
    yield _Sample("tscale_credit_tokens_total", "Tokens of this node taken into manifests", credit.tokens_accepted)
    yield _Sample("tscale_contributions_total", "Contributions", credit.contributions_accepted, result="accepted")
    yield _Sample("tscale_contributions_total", "Contributions", credit.contributions_missed, result="missed")
    about = "Contributions of anybody that this node's folds left out or made smaller"
    yield _Sample("tscale_screened_total", about, screen.left_out, reason="against_the_others")
    yield _Sample("tscale_screened_total", about, screen.shrunk, reason="too_large")
