"""Running a node from a command: its folder, its log, its display, and the daemon until it ends."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tscale.node.cli.logfile import log_to_folder
from tscale.node.config import NodeConfig, load_config, override
from tscale.node.instances import base_dir, claim_folder, removed_if_unused
from tscale.node.live import Display, choose_display
from tscale.node.local_peers import announce_local, find_local, withdraw_local
from tscale.node.swarm_argument import SwarmTarget, stored_spec
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.status import StatusSnapshot

EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class NodeRequest:
    """What a command asks for; None leaves the choice to the configuration file."""

    target: SwarmTarget
    role: str
    state_dir: Path | None = None
    host: str | None = None
    port: int | None = None
    name: str | None = None
    config: Path | None = None
    seeds: tuple[str, ...] = ()
    dataset_files: tuple[Path, ...] = field(default=())
    as_json: bool = False
    checked: bool = False
    """Whether the machine is known to suit the swarm's model."""


class AnnouncingDisplay:
    """A display that also tells this user's other nodes on this machine where the node is."""

    def __init__(self, inner: Display, swarm_id: str) -> None:
        self._inner, self._swarm_id = inner, swarm_id

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        withdraw_local(self._swarm_id)
        self._inner.__exit__(kind, error, trace)

    def on_ready(self, link: str, addrs: list[str]) -> None:
        for addr in addrs:
            announce_local(self._swarm_id, addr)
        self._inner.on_ready(link, addrs)

    def on_status(self, snapshot: StatusSnapshot) -> None:
        self._inner.on_status(snapshot)

    def on_notice(self, line: str) -> None:
        self._inner.on_notice(line)


def check_machine(spec: SwarmSpec, config: NodeConfig, swarm_dir: Path) -> None:
    """Raises BadInput or DiskFull for what a worker would refuse at its start: before others are given a link."""
    from tscale.node.suitability import require_suitable
    from tscale.node.worker.kernel_config import kernel_config

    require_suitable(kernel_config(spec), config.compute, swarm_dir)


def run_here(request: NodeRequest) -> int:
    """Run a node until it is stopped. Returns its exit code; what stops it early is a StopNode error."""
    from tscale.node.daemon import NodeOptions, run_node

    target = request.target
    config = override(
        load_config(request.config),
        {"network.host": request.host, "network.port": request.port, "name": request.name},
    )
    with ExitStack() as stack:
        base = base_dir(request.state_dir, config)
        instance = claim_folder(stack, base, target.swarm_id, numbered=request.state_dir is None)
        stack.enter_context(removed_if_unused(instance))
        log_to_folder(instance.state.log)
        spec = target.spec or stored_spec(instance.state.spec, target.swarm_id)
        if spec is not None and request.role == "trainer" and not request.checked:
            check_machine(spec, config, instance.state.path)
        options = NodeOptions(
            swarm_id=target.swarm_id,
            spec=spec,
            swarm_dir=instance.state.path,
            role=request.role,
            seeds=tuple(dict.fromkeys((*request.seeds, *target.seeds, *find_local(target.swarm_id)))),
            host=config.network.host,
            port=config.network.port,
            name=config.name,
            config=config,
            dataset_files=(*request.dataset_files, *target.dataset_files),
        )
        display = stack.enter_context(AnnouncingDisplay(choose_display(request.as_json), target.swarm_id))
        if instance.notice is not None:
            display.on_notice(instance.notice)
        try:
            return asyncio.run(run_node(options, display))
        except asyncio.CancelledError:  # the second Ctrl-C: at once
            return EXIT_INTERRUPTED
