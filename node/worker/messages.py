"""What the node and its worker say to each other: frozen dataclasses in length-prefixed msgpack frames.

A frame is a 4-byte big-endian length and `msgpack([call_id, kind, {field: value}])`. The node numbers its commands
from 1; the worker answers with the same number, and its unasked events carry number 0. Files travel as paths.
This module imports neither torch nor numpy, because the node process uses it.
"""

import dataclasses
import struct
import types
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgpack

MAX_FRAME_BYTES = 4 << 20
EVENT = 0
_LENGTH = struct.Struct(">I")

R_co = TypeVar("R_co", covariant=True)


class BadMessage(ValueError):
    """A frame that is too long, not msgpack, or not one of the messages below."""


class Command(Generic[R_co]):
    """A request of the node; the parameter is the class of its answer."""


@dataclass(frozen=True)
class WorkerConfig:
    """The first frame of the node: everything a worker needs, none of it negotiable later.

    `genesis` and `genesis_round` name the state before the first manifest. `data` are the spec's shards as files, in
    the spec's order. `scratch_dir` takes the compressed contributions (the node moves or deletes them).
    `checkpoint_every_folds` 0 means that only the node asks for checkpoints. `precision` and `device` are what the
    person asked for. `offload_slots` 0 leaves them to the plan; the limits of memory are 0 for what the machine has.
    `spill_dir` takes what main memory is too short for; when it is empty, `scratch_dir` does.
    """

    spec: bytes
    public: bytes
    genesis: bytes
    genesis_round: int
    data: tuple[str, ...]
    checkpoint_dir: str
    scratch_dir: str
    threads: int = 1
    nice: int = 5
    paused: bool = False
    checkpoint_every_folds: int = 0
    evaluate_windows: int = 32
    evaluate_fraction: float = 0.02
    precision: str = "auto"
    device: str = "auto"
    offload_slots: int = 0
    vram_bytes: int = 0
    ram_bytes: int = 0
    spill_dir: str = ""


@dataclass(frozen=True)
class Closed:
    """A compressed contribution at `path`. `base_state` is the digest of the anchor it was trained from."""

    path: str
    size_bytes: int
    tokens: int
    steps: int
    loss: float
    round: int
    base: bytes
    base_state: bytes


@dataclass(frozen=True)
class Verified:
    """Whether a blob may be folded; `reason` is empty when it may."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Folded:
    """The state after a manifest. `seconds` is the whole command, decoding included. `left_out` and `shrunk` are the
    places of the parts that the screen left out (they go against the others) or made smaller (they are too large)."""

    manifest: bytes
    state_digest: bytes
    seconds: float
    left_out: tuple[int, ...] = ()
    shrunk: tuple[int, ...] = ()


@dataclass(frozen=True)
class SnapshotWritten:
    """A snapshot file: little-endian float32, the anchor and then the momentum, in layout order."""

    size_bytes: int
    state_digest: bytes


@dataclass(frozen=True)
class Loaded:
    """A snapshot was adopted: the residual is empty and training starts from the anchor."""

    manifest: bytes
    state_digest: bytes


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written (also sent unasked when `checkpoint_every_folds` is set)."""

    manifest: bytes
    note: str


@dataclass(frozen=True)
class Evaluated:
    """Held-out loss of an anchor in nats per token (also sent unasked after folds)."""

    manifest: bytes
    round: int
    loss: float


@dataclass(frozen=True)
class Generated:
    """Text continued by the anchor; bytes that are not UTF-8 are replaced."""

    text: str


@dataclass(frozen=True)
class Paused:
    """The training thread has seen the wish."""

    paused: bool


@dataclass(frozen=True)
class Stopped:
    """The worker exits right after this. `saved` tells whether a checkpoint was written; else `note` says why not."""

    saved: bool
    note: str


@dataclass(frozen=True)
class Close(Command[Closed]):
    """Cut the round: compress the progress since the last cut at `rung` (index into the spec's ladder).

    `base` is the node's idea of the head; `Closed.base` is what was really trained from (a fold may be under way).
    """

    round: int
    base: bytes
    rung: int


@dataclass(frozen=True)
class Verify(Command[Verified]):
    """Decode a blob and check caps, shapes, rung, finiteness and the norm bound."""

    path: str
    rung: int


@dataclass(frozen=True)
class Fold(Command[Folded]):
    """Apply a manifest to the state after `parent` (the head, or its parent: a fork of one round).

    `parts` are (path, share, gain) in the manifest's order, a share being tokens * age factor; `total_tokens` is
    cumulative, this manifest included.
    """

    manifest: bytes
    parent: bytes
    parts: tuple[tuple[str, float, float], ...]
    total_tokens: int
    round: int


@dataclass(frozen=True)
class WriteSnapshot(Command[SnapshotWritten]):
    """Write the state after `manifest` (the head or its parent) to `path`, atomically."""

    manifest: bytes
    path: str


@dataclass(frozen=True)
class Load(Command[Loaded]):
    """Adopt a snapshot. With `state_digest` not empty, a file of another digest is refused and nothing changes."""

    manifest: bytes
    path: str
    total_tokens: int
    round: int
    state_digest: bytes = b""


@dataclass(frozen=True)
class Save(Command[Saved]):
    """Write a checkpoint of everything a restart needs."""


@dataclass(frozen=True)
class Evaluate(Command[Evaluated]):
    """Held-out loss of the head anchor on `windows` windows, now (training waits for it)."""

    windows: int


@dataclass(frozen=True)
class Generate(Command[Generated]):
    """Continue `prompt` by `tokens` bytes with the head anchor (training waits for it)."""

    prompt: str
    tokens: int
    seed: int
    temperature: float = 0.8


@dataclass(frozen=True)
class SetPaused(Command[Paused]):
    """Stop or resume training steps; all other commands go on working."""

    paused: bool


@dataclass(frozen=True)
class Stop(Command[Stopped]):
    """End the worker, with a checkpoint or without."""

    save: bool


@dataclass(frozen=True)
class Ready:
    """The worker has its state. `note` says what was wrong with a checkpoint, and is empty when nothing was.

    `precision` says what the model is trained in and why, `precision_warning` the same when it is not what the machine
    or the person would have; `device` and `device_warning` say the same of where it is trained.
    """

    manifest: bytes
    round: int
    state_digest: bytes
    total_tokens: int
    previous_manifest: bytes | None
    note: str
    resumed: bool
    parameters: int
    state_bytes: int
    precision: str = ""
    precision_warning: str = ""
    device: str = ""
    device_warning: str = ""


@dataclass(frozen=True)
class Progress:
    """About every second. `tokens` and `steps` count over all runs of this node; `loss` is the mean since the last
    close (None before the first step after it); `training_s` and `wall_s` count since the worker started."""

    tokens: int
    steps: int
    loss: float | None
    tokens_per_s: float
    training_s: float
    wall_s: float


@dataclass(frozen=True)
class Failed:
    """A command (or, with number 0, the worker) failed; `kind` is a key of supervisor.FAILURES."""

    kind: str
    message: str


Event = Ready | Progress | Evaluated | Saved | Failed
AnyCommand = Close | Verify | Fold | WriteSnapshot | Load | Save | Evaluate | Generate | SetPaused | Stop
AnyResult = (
    Closed | Verified | Folded | SnapshotWritten | Loaded | Saved | Evaluated | Generated | Paused | Stopped | Failed
)
Message = WorkerConfig | AnyCommand | AnyResult | Event

_KINDS: typing.Final[typing.Mapping[str, type[Any]]] = types.MappingProxyType(
    {kind.__name__: kind for kind in typing.get_args(Message)}
)
ANSWERS: typing.Final[typing.Mapping[type[Any], type[Any]]] = types.MappingProxyType(
    {command: typing.get_args(command.__orig_bases__[0])[0] for command in typing.get_args(AnyCommand)}
)


def encode_frame(call_id: int, message: object) -> bytes:
    """One frame, length included.

    Raises:
        BadMessage: the message is longer than MAX_FRAME_BYTES.
    """
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}  # type: ignore[arg-type]
    body = msgpack.packb([call_id, type(message).__name__, fields], use_bin_type=True)
    if len(body) > MAX_FRAME_BYTES:
        raise BadMessage(f"a {type(message).__name__} of {len(body)} bytes is over the cap of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + bytes(body)


def frame_length(prefix: bytes) -> int:
    """The body length that a 4-byte prefix announces, checked before anything is allocated.

    Raises:
        BadMessage: over MAX_FRAME_BYTES.
    """
    length = int(_LENGTH.unpack(prefix)[0])
    if length > MAX_FRAME_BYTES:
        raise BadMessage(f"a frame of {length} bytes is over the cap of {MAX_FRAME_BYTES}")
    return length


def decode_body(body: bytes) -> tuple[int, Any]:
    """(call id, message) of one frame body; unknown kinds, fields and types are refused.

    Raises:
        BadMessage: anything else than a message of this module.
    """
    try:
        decoded = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise BadMessage(f"not msgpack: {error}") from None
    if not (isinstance(decoded, list) and len(decoded) == 3):
        raise BadMessage("a message is [number, kind, fields]")
    call_id, name, fields = decoded
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(fields, dict) or not _fits(call_id, int):
        raise BadMessage(f"unknown kind of message: {name!r:.60}")
    hints = typing.get_type_hints(kind)
    if set(fields) != set(hints):
        raise BadMessage(f"{name} has the fields {sorted(hints)}, not {sorted(map(str, fields))}")
    values = {field: _as_tuple(value) for field, value in fields.items()}
    for field, value in values.items():
        if not _fits(value, hints[field]):
            raise BadMessage(f"{name}.{field} is no {hints[field]}")
    return call_id, kind(**values)


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _fits(value: object, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return any(_fits(value, option) for option in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if hint is int or hint is float:
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)
