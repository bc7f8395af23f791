"""From a config to a session: a new one at genesis, or the last checkpoint's. And back: a session as a checkpoint.

A checkpoint holds the outer states (head and its parent), everything local (residual, local parameters, start, inner
optimizer) and the counters, so that a worker goes on with the very step it would have done next.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tscale.kernels.block import Product
from tscale.kernels.codec import decode, encode
from tscale.kernels.digest import state_digest
from tscale.kernels.fold import fold
from tscale.kernels.init import init_state
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.precision.capabilities import Capabilities
from tscale.kernels.precision.selftest import Precision, choose
from tscale.kernels.replica import OuterState, Replica
from tscale.kernels.screen import THREE, Share, screen
from tscale.node.checkpoint import load_checkpoint, save_checkpoint
from tscale.node.data.corpus import ByteCorpus
from tscale.node.worker.kernel_config import KernelConfig, kernel_config
from tscale.node.worker.messages import Ready, WorkerConfig
from tscale.node.worker.progress import Tally
from tscale.node.worker.session import Base, Between, Emit, Session, SessionParts
from tscale.node.worker.trainers import arrange, make_arrays, make_trainer, make_vectors
from tscale.protocol.errors import BadInput, DamagedState, RefuseFrame
from tscale.protocol.spec import SwarmSpec

FORMAT = 1
_INNER = "inner/"


def open_session(config: WorkerConfig, between: Between, emit: Emit) -> tuple[Session, Ready]:
    """The session of a starting worker. `between` is not used before this returns.

    A damaged checkpoint is no error: the one before it, or genesis, is taken, and Ready's note says so.

    Raises:
        BadInput: the spec or the data files can't be used, or the machine is too small.
        DiskFull: what should lie on disk instead of in main memory does not fit there.
    """
    torch.set_num_threads(config.threads)
    spec = read_spec(config.spec)
    kernels = kernel_config(spec)
    corpus = ByteCorpus(read_shards(spec, config.data), spec.data.heldout_per_mille)
    corpus.batch(bytes(32), 0, 1, kernels.inner.context)  # a text that is too short is refused now, not in a step
    warm_up(kernels)
    arrangement = arrange(config, kernels)
    spill_dir = config.spill_dir or config.scratch_dir
    new_array = make_arrays(arrangement, spill_dir)
    vectors = make_vectors(arrangement, kernels.layout, new_array)
    anchor = vectors.rounds()
    np.copyto(anchor, init_state(kernels.model, spec.seed))
    replica = Replica(kernels.layout, anchor, spec.outer.rho, spec.outer.beta, kernels.rule, vectors)
    precision, product = choose_precision(arrangement.machine, config.precision)
    trainer = make_trainer(arrangement, kernels, replica.local, corpus.counts, product, spill_dir)
    parts = SessionParts(spec, config, kernels, replica, trainer, corpus, between, emit, save_session, new_array)
    genesis_state = state_digest(kernels.layout, replica.head.anchor, replica.head.momentum)
    session = Session(parts, Base(config.genesis, config.genesis_round, 0, genesis_state))
    resumed, note = _resume(session)
    for leftover in Path(config.scratch_dir).glob("*.part"):
        leftover.unlink(missing_ok=True)
    head = session.head
    return session, Ready(
        manifest=head.manifest,
        round=head.round,
        state_digest=head.state,
        total_tokens=head.total_tokens,
        previous_manifest=None if session.parent is None else session.parent.manifest,
        note=note,
        resumed=resumed,
        parameters=kernels.layout.numel,
        state_bytes=session.state_bytes,
        precision=precision.text,
        precision_warning=precision.warning,
        device=arrangement.text,
        device_warning=arrangement.warning,
    )


def choose_precision(machine: Capabilities, wish: str) -> tuple[Precision, Product | None]:
    """What this machine multiplies in; only the trainer uses it. Raises BadInput for an unknown wish."""
    try:
        return choose(machine, wish)
    except ValueError as error:
        raise BadInput(str(error)) from error


def read_spec(data: bytes) -> SwarmSpec:
    """The spec, checked for what this worker can train. Raises BadInput."""
    try:
        spec = SwarmSpec.from_bytes(data)
    except RefuseFrame as error:
        raise BadInput(f"the swarm's spec can't be used: {error}") from error
    if spec.model.vocab != 256:
        raise BadInput(f"data of format 'bytes' needs a vocabulary of 256, the spec has {spec.model.vocab}")
    return spec


def read_shards(spec: SwarmSpec, paths: tuple[str, ...]) -> bytes | np.memmap:
    """The shards' bytes in order, mapped when there is one.

    Raises:
        BadInput: a file is missing, or its size is not the spec's.
    """
    if len(paths) != len(spec.data.shards):
        raise BadInput(f"the swarm's data has {len(spec.data.shards)} shards, {len(paths)} files were given")
    for path, shard in zip(paths, spec.data.shards, strict=True):
        try:
            size_bytes = Path(path).stat().st_size
        except OSError as error:
            raise BadInput(f"the data file {path} can't be read: {error.strerror}") from error
        if size_bytes != shard.size_bytes:
            raise BadInput(f"the data file {path} has {size_bytes} bytes, the swarm's shard has {shard.size_bytes}")
    if len(paths) == 1:
        return np.memmap(paths[0], np.uint8, "r")
    return b"".join(Path(path).read_bytes() for path in paths)


def warm_up(kernels: KernelConfig) -> None:
    """Compile codec, screen and fold on a small tensor now, not in the first round, where it would stop training."""
    layout = Layout((TensorSpec("large", (3, 4096), "matrix"), TensorSpec("small", (8,), "small")))
    anchor = np.zeros(layout.numel, np.float32)
    momentum = None if kernels.rule.mu == 0 else np.zeros_like(anchor)
    for rung in kernels.rungs:
        residual = np.linspace(-1, 1, layout.numel, dtype=np.float32)
        blob = encode(residual, layout, rung)
        decode(blob, layout, rung).rms()
        parts = screen([Share(blob, 1.0, 1.0)] * THREE, layout).parts
        fold(anchor, momentum, parts, layout, kernels.rule)


def save_session(session: Session) -> str:
    """Write a checkpoint; returns a note for the log.

    Raises:
        DiskFull: it does not fit; the checkpoint before is intact.
    """
    replica = session.replica

    def copy(array: np.ndarray) -> np.ndarray:
        made = session.parts.new_array(array.shape, array.dtype.str)
        np.copyto(made, array)
        return made

    def copy_training() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays = {_INNER + name: array for name, array in session.trainer.state_arrays(copy).items()}
        tally = session.tally
        return arrays | {"local": copy(replica.local)}, {
            "base_steps": session.base_steps,
            "tally": [tally.steps, tally.tokens, tally.loss_sum, tally.spoilt],
            "tokens": session.meter.tokens,
            "steps": session.meter.steps,
        }

    arrays, counters = session.on_training_thread(copy_training)
    arrays |= {"residual": replica.residual, "start": replica.start}
    arrays |= _state_arrays("head", replica.head)
    if replica.parent is not None and session.parent is not None:
        arrays |= _state_arrays("parent", replica.parent)
    meta = counters | {
        "format": FORMAT,
        "spec": session.parts.spec.digest.hex(),
        "head": _base_meta(session.head),
        "parent": None if session.parent is None else _base_meta(session.parent),
    }
    save_checkpoint(Path(session.parts.config.checkpoint_dir), arrays, meta)
    return f"round {session.head.round}"


def _resume(session: Session) -> tuple[bool, str]:
    """Whether a checkpoint was taken over, and what was wrong with it or with the newest one."""
    replica = session.replica
    # read in place, so that a start takes no more memory than training does
    mine = {"local": replica.local, "residual": replica.residual, "start": replica.start}
    try:
        found = load_checkpoint(Path(session.parts.config.checkpoint_dir), session.parts.new_array, mine)
    except DamagedState as error:
        _forget(replica)
        return False, f"{error}, or from the newest snapshot"
    if found is None:
        return False, ""
    arrays, meta, note = found
    try:
        _restore(session, arrays, meta)
    except (KeyError, ValueError, TypeError) as error:
        _forget(replica)
        return False, f"the checkpoint does not fit this swarm ({error}); starting from the beginning of the run"
    return True, note or ""


def _forget(replica: Replica) -> None:
    """Local vectors that may hold anything begin at the anchor again."""
    replica.restart()
    replica.go_to_start()


def _restore(session: Session, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Raises KeyError, ValueError or TypeError before the head has changed."""
    if meta["format"] != FORMAT or meta["spec"] != session.parts.spec.digest.hex():
        raise ValueError("it is of another swarm or version")
    replica, layout = session.replica, session.replica.layout
    has_momentum = replica.head.momentum is not None
    head, head_base = _read_state("head", arrays, layout, has_momentum), _read_base(meta["head"])
    if state_digest(layout, head.anchor, head.momentum) != head_base.state:
        raise ValueError("its state does not have its digest")
    parent = parent_base = None
    if meta["parent"] is not None:
        parent, parent_base = _read_state("parent", arrays, layout, has_momentum), _read_base(meta["parent"])
    local, residual, start = (_vector(arrays, name, layout) for name in ("local", "residual", "start"))
    steps, tokens, loss_sum, spoilt = meta["tally"]
    tally = Tally(int(steps), int(tokens), float(loss_sum), bool(spoilt))
    base_steps, all_tokens, all_steps = int(meta["base_steps"]), int(meta["tokens"]), int(meta["steps"])
    inner = {name.removeprefix(_INNER): array for name, array in arrays.items() if name.startswith(_INNER)}
    session.trainer.load_state_arrays(inner)
    replica.head, replica.parent = head, parent
    for mine, theirs in ((replica.local, local), (replica.residual, residual), (replica.start, start)):
        if mine is not theirs:
            np.copyto(mine, theirs)
    session.take_over(head_base, parent_base, tally)
    session.base_steps = base_steps
    session.meter.resume(all_tokens, all_steps)


def _state_arrays(prefix: str, state: OuterState) -> dict[str, np.ndarray]:
    arrays = {f"{prefix}/anchor": state.anchor}
    return arrays if state.momentum is None else arrays | {f"{prefix}/momentum": state.momentum}


def _read_state(prefix: str, arrays: dict[str, np.ndarray], layout: Layout, has_momentum: bool) -> OuterState:
    momentum = _vector(arrays, f"{prefix}/momentum", layout) if has_momentum else None
    return OuterState(_vector(arrays, f"{prefix}/anchor", layout), momentum)


def _vector(arrays: dict[str, np.ndarray], name: str, layout: Layout) -> np.ndarray:
    layout.check(arrays[name], name)
    return arrays[name]


def _base_meta(base: Base) -> dict[str, Any]:
    return {
        "manifest": base.manifest.hex(),
        "round": base.round,
        "total_tokens": base.total_tokens,
        "state": base.state.hex(),
    }


def _read_base(meta: dict[str, Any]) -> Base:
    return Base(
        bytes.fromhex(meta["manifest"]), int(meta["round"]), int(meta["total_tokens"]), bytes.fromhex(meta["state"])
    )
