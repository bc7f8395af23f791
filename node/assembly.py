"""What a node is made of: its transport, its store with the dataset in it, its state machine, its worker's config."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.node.blobs import BlobStore
from tscale.node.bootstrap import is_peer_record
from tscale.node.config import NodeConfig
from tscale.node.data.corpus import load_text_file
from tscale.node.netaddr import require_free_port
from tscale.node.recordfile import RecordFile
from tscale.node.statedir import StateDir, atomic_write
from tscale.node.transport.p2p import P2PConfig, P2PTransport
from tscale.node.worker.messages import WorkerConfig
from tscale.protocol.addrs import parse_addr
from tscale.protocol.chain import genesis_digest
from tscale.protocol.errors import BadInput, StopNode
from tscale.protocol.hashing import BlobRef, blob_ref
from tscale.protocol.identity import Identity
from tscale.protocol.peer import PeerMachine
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.view import PeerConfig

DEFAULT_UPLOAD_BPS = 20e6
_KEPT_SNAPSHOTS = 3


@dataclass(frozen=True)
class NodeOptions:
    """One node of one swarm. `spec` None: fetch it from the seeds and check it against the id. The caller holds the
    lock of `swarm_dir`. `dataset_files` are texts of the spec's dataset that lie on this machine."""

    swarm_id: str
    spec: SwarmSpec | None
    swarm_dir: Path
    role: str
    seeds: tuple[str, ...]
    host: str
    port: int
    name: str
    config: NodeConfig
    dataset_files: tuple[Path, ...] = ()


def choose_port(options: NodeOptions, state: StateDir) -> int:
    """The port that was asked for; else the one of the last run if it is free, so that links that name it stay good;
    else 0 for any."""
    if options.port:
        return options.port
    try:
        port = int(state.port.read_text())
        require_free_port(options.host, port)
    except (OSError, ValueError, OverflowError, StopNode):
        return 0
    return port if 0 < port < 65536 else 0


def keep_port(state: StateDir, addrs: list[str]) -> None:
    """Remember the port that others were told."""
    if addrs:
        atomic_write(state.port, str(parse_addr(addrs[0]).port).encode(), durable=False)


def make_transport(options: NodeOptions, state: StateDir, now_unix_s: Callable[[], float]) -> P2PTransport:
    """The real network, with the person's limits. Not started yet."""
    network = options.config.network
    transport = P2PTransport(
        P2PConfig(
            key_file=state.identity_key,
            swarm_id=options.swarm_id,
            host=options.host,
            port=choose_port(options, state),
            listen=network.listen,
            seeds=options.seeds,
            announce=network.announce,
            serve_dht=network.reachable and network.listen,
            check_record=is_peer_record,
            now_unix_s=now_unix_s,
        )
    )
    transport.link.upload.set_rate(network.upload_bytes_per_s or None)
    transport.link.download.set_rate(network.download_bytes_per_s or None)
    return transport


def count_parameters(spec: SwarmSpec) -> int:
    """The size of the spec's model. Raises BadInput when this version can't train it."""
    try:
        return model_layout(ModelConfig(**asdict(spec.model))).numel
    except (ValueError, TypeError) as error:
        raise BadInput(f"this version can't train the model of the spec: {error}") from error


def open_store(options: NodeOptions, state: StateDir, spec: SwarmSpec, parameters: int) -> BlobStore:
    """The blob store with the dataset files that lie here. Raises BadInput for a file that is not of the dataset and
    for a quota that can't hold the swarm."""
    quota_bytes = options.config.storage.blob_quota_bytes
    state_bytes = 4 * parameters * (2 if spec.outer.mu else 1)
    need_bytes = sum(shard.size_bytes for shard in spec.data.shards) + _KEPT_SNAPSHOTS * state_bytes
    if need_bytes > quota_bytes:
        raise BadInput(
            f"the swarm needs {need_bytes} bytes for its dataset and snapshots, but storage.blob_quota_bytes is "
            f"{quota_bytes}: raise it in the configuration file"
        )
    store = BlobStore(state.blobs, quota_bytes)
    wanted = {shard.root for shard in spec.data.shards}
    store.set_pins(wanted)
    for path in options.dataset_files:
        data = load_text_file(path)
        if blob_ref(data).root not in wanted:
            raise BadInput(f"{path} is not a text of this swarm's dataset: leave out --data and it is fetched")
        store.add_bytes(data)
    return store


def make_machine(options: NodeOptions, identity: Identity, spec: SwarmSpec, parameters: int) -> PeerMachine:
    """The peer's state machine, knowing nothing yet."""
    upload_bps = 8.0 * options.config.network.upload_bytes_per_s or DEFAULT_UPLOAD_BPS
    return PeerMachine(
        PeerConfig(
            spec=spec,
            identity=identity,
            role=options.role,
            seed=secrets.randbits(63),
            name=options.name,
            parameters=parameters,
            upload_bps=upload_bps,
            has_seeds=bool(options.seeds),
        )
    )


def restore(machine: PeerMachine, store: BlobStore, records: RecordFile) -> int:
    """Give the machine what the last run kept, and drop the blobs nobody will ask for. Returns how many records were
    damaged."""
    complete: dict[BlobRef, tuple[bytes, ...]] = {}
    for ref in store.refs():
        hashes = store.hashes(ref.root)
        if hashes is not None:
            complete[ref] = hashes
    partial = {ref: (h, set(store.have(ref.root))) for ref in store.parts() if (h := store.hashes(ref.root))}
    bad = machine.restore(records.load(), complete, partial)
    dataset = {shard.root for shard in machine.view.spec.data.shards}
    for ref in complete:
        if ref.root not in dataset and ref.root not in machine.view.kinds:
            machine.view.transfers.forget(ref.root)
            store.drop(ref.root)
    return bad


def make_worker_config(
    options: NodeOptions, state: StateDir, identity: Identity, spec: SwarmSpec, store: BlobStore
) -> WorkerConfig:
    """What the worker is started with, once the dataset is whole. Raises BadInput when it is not."""
    paths = [store.path(shard.root) for shard in spec.data.shards]
    if any(path is None for path in paths):
        raise BadInput(f"the dataset in {state.blobs} is damaged: start the node again and it is fetched anew")
    compute = options.config.compute
    return WorkerConfig(
        spec=spec.to_bytes(),
        public=identity.public,
        genesis=genesis_digest(spec.swarm_id),
        genesis_round=-1,
        data=tuple(str(path) for path in paths),
        checkpoint_dir=str(state.checkpoint),
        scratch_dir=str(scratch_dir(state)),
        threads=compute.threads or 1,
        device=compute.device,
        offload_slots=compute.offload_slots,
        vram_bytes=compute.vram_bytes,
        ram_bytes=compute.ram_bytes,
        spill_dir=str(Path(compute.spill_dir).expanduser()) if compute.spill_dir else str(state.path / "spill"),
        precision=options.config.training.precision,
        paused=True,
        checkpoint_every_folds=spec.rounds.snapshot_every,
    )


def scratch_dir(state: StateDir) -> Path:
    """Where the worker leaves its contributions and snapshots for the node."""
    return state.path / "scratch"
