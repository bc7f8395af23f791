"""The node's settings: one frozen tree from a TOML file, the command line over it. Training is the SwarmSpec's."""

from __future__ import annotations

import difflib
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from tscale.protocol.errors import BadInput

MAX_CONFIG_BYTES = 1 << 20
MAX_NAME_CHARS = 32
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "bf16", "fp8", "int8")


@dataclass(frozen=True)
class NetworkConfig:
    """Where to listen and how much to carry.

    `port` 0 takes any free one; give a fixed one when a router forwards it. `announce` are multiaddrs to tell others
    instead of those the machine shows. `listen = false` only dials out. `reachable = false` says that others can't
    dial this node, so that it keeps no directory records for them. The rates are bytes per second, 0 is no limit.
    """

    host: str = "0.0.0.0"
    port: int = 0
    announce: tuple[str, ...] = ()
    listen: bool = True
    reachable: bool = True
    upload_bytes_per_s: int = 0
    download_bytes_per_s: int = 0


@dataclass(frozen=True)
class StorageConfig:
    """Where files go and how much. An empty `state_dir` is the platform's place for program data."""

    state_dir: str = ""
    blob_quota_bytes: int = 10 << 30


@dataclass(frozen=True)
class ComputeConfig:
    """Where and with how much of this machine the worker trains.

    `threads` 0 is one, which leaves the machine usable. `device` is one of DEVICES: "auto" takes a card where there is
    one and the model fits ("cuda" is AMD's, too). `vram_bytes` and `ram_bytes` are limits, 0 is all there is. What
    main memory is too short for goes to `spill_dir`; when that is empty, to the node's own folder. `offload_slots` from
    2 on trains layer after layer with so many slots, also on the processor; 0 leaves that to the plan.
    """

    threads: int = 0
    device: str = "auto"
    vram_bytes: int = 0
    ram_bytes: int = 0
    spill_dir: str = ""
    offload_slots: int = 0


@dataclass(frozen=True)
class TrainingConfig:
    """How this machine computes what the swarm's spec says: one of PRECISIONS. Peers may differ."""

    precision: str = "auto"


@dataclass(frozen=True)
class NodeConfig:
    """All settings of a node. `name` is shown to other peers; empty shows the peer id only."""

    name: str = ""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def default_config_file() -> Path:
    """`config.toml` under the platform's place for a program's settings."""
    return user_config_path("tscale") / "config.toml"


def load_config(path: Path | None = None) -> NodeConfig:
    """The settings in a file; the defaults when no path is given and the default file does not exist.

    Raises BadInput with one line: no such file, not TOML, an unknown key (with the nearest known one), a value of
    the wrong type or out of range.
    """
    file = path or default_config_file()
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError as error:
        if path is None:
            return NodeConfig()
        raise BadInput(f"there is no config file {path}: check the path") from error
    except OSError as error:
        raise BadInput(f"can't read the config file {file} ({error.strerror}): check the path and its mode") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise BadInput(f"the config file {file} is longer than {MAX_CONFIG_BYTES} bytes: is it the right file?")
    return parse_config(data, str(file))


def parse_config(data: bytes, where: str) -> NodeConfig:
    """The settings in a TOML file's bytes, with or without a byte order mark. Raises BadInput like `load_config`."""
    try:
        tree = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{where} is not UTF-8 text: save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where} is not TOML: {error}") from error
    config: NodeConfig = _build(NodeConfig(), tree, "", where)
    _check_ranges(config, where)
    return config


def override(config: NodeConfig, values: dict[str, Any]) -> NodeConfig:
    """The settings with some replaced, by dotted name (`network.port`), as the command line does; None keeps the old.

    Raises BadInput like `load_config`.
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        section, dot, key = name.rpartition(".")
        target = tree.setdefault(section, {}) if dot else tree
        target[key] = list(value) if isinstance(value, tuple) else value
    changed: NodeConfig = _build(config, tree, "", "the command line")
    _check_ranges(changed, "the command line")
    return changed


def _build(base: Any, tree: dict[str, Any], section: str, where: str) -> Any:
    hints = typing.get_type_hints(type(base))
    known = [item.name for item in fields(base)]
    changes: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            raise BadInput(_unknown(key, known, section, where))
        old = getattr(base, key)
        if is_dataclass(old):
            if not isinstance(value, dict):
                raise BadInput(f"{where}: {key} is a section, write [{key}] and its keys below it")
            changes[key] = _build(old, value, key, where)
        else:
            changes[key] = _convert(value, hints[key], f"{section}.{key}" if section else key, where)
    return replace(base, **changes)


def _unknown(key: str, known: list[str], section: str, where: str) -> str:
    place = f"in [{section}]" if section else "at the top"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f'{where}: unknown key "{key}" {place}: did you mean "{near[0]}"?'
    elsewhere = _keys_of_sections()
    if key in elsewhere:
        return f'{where}: unknown key "{key}" {place}: it belongs in [{elsewhere[key]}]'
    far = difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.5)
    hint = f'did you mean "{far[0]}" in [{elsewhere[far[0]]}]?' if far else f"known are {', '.join(known)}"
    return f'{where}: unknown key "{key}" {place}: {hint}'


def _keys_of_sections() -> dict[str, str]:
    """Every key of a section, with the section's name."""
    default = NodeConfig()
    sections = [item.name for item in fields(NodeConfig) if is_dataclass(getattr(default, item.name))]
    return {key.name: section for section in sections for key in fields(getattr(default, section))}


def _convert(value: Any, hint: Any, name: str, where: str) -> Any:
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadInput(f'{where}: {name} is a list of texts, like ["a", "b"]')
        return tuple(value)
    # bool is an int to Python, but not to the person who writes the file
    if type(value) is not hint:
        number = "a whole number of bytes, like 16000000000" if name.endswith("_bytes") else "a whole number"
        wanted = {int: number, str: "a text in quotes", bool: "true or false", float: "a number"}[hint]
        raise BadInput(f"{where}: {name} is {wanted}, not {value!r}")
    return value


_RANGES = types.MappingProxyType(
    {
        "network.port": (0, 65535),
        "network.upload_bytes_per_s": (0, math.inf),
        "network.download_bytes_per_s": (0, math.inf),
        "storage.blob_quota_bytes": (1 << 20, math.inf),
        "compute.threads": (0, 1024),
        "compute.vram_bytes": (0, math.inf),
        "compute.ram_bytes": (0, math.inf),
        "compute.offload_slots": (0, 4096),
    }
)


_SMALLEST = types.MappingProxyType(
    {
        "compute.vram_bytes": (1 << 20, "12 GB is 12000000000"),
        "compute.ram_bytes": (1 << 20, "16 GB is 16000000000"),
        "network.upload_bytes_per_s": (100, "20 Mbit/s is 2500000"),
        "network.download_bytes_per_s": (100, "20 Mbit/s is 2500000"),
    }
)
"""Below these, a unit was forgotten."""


def _check_ranges(config: NodeConfig, where: str) -> None:
    for name, (low, high) in _RANGES.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if not low <= value <= high:
            limit = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise BadInput(f"{where}: {name} is {limit}, not {value}")
    for name, (least, example) in _SMALLEST.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if 0 < value < least:
            raise BadInput(f"{where}: {name} is in bytes, and {value} is too few: {example}; 0 is no limit")
    if config.compute.offload_slots == 1:
        raise BadInput(f"{where}: compute.offload_slots is 0 or at least 2: a layer's weights and its momentum")
    if config.compute.device not in DEVICES:
        raise BadInput(f'{where}: compute.device is one of {", ".join(DEVICES)}, not "{config.compute.device}"')
    if config.training.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise BadInput(f'{where}: training.precision is one of {known}, not "{config.training.precision}"')
    if len(config.name) > MAX_NAME_CHARS or not config.name.isprintable():
        raise BadInput(f"{where}: name has at most {MAX_NAME_CHARS} printable characters")
