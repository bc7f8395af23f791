"""Whether this machine can train a model with the person's settings: what a worker would refuse, without one."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tscale.node.config import ComputeConfig
from tscale.node.statedir import nearest_folder, write_error
from tscale.protocol.errors import BadInput, DiskFull

if TYPE_CHECKING:
    from tscale.node.worker.kernel_config import KernelConfig
    from tscale.node.worker.trainers import Arrangement

SETTING = "compute.spill_dir in the configuration file"


@dataclass(frozen=True)
class Suitability:
    """How a machine trains a model: `spill_bytes` lie in `spill_dir` while it does, and `stored_bytes` stay with the
    node's files."""

    arrangement: Arrangement
    spill_dir: Path
    spill_bytes: int
    stored_bytes: int


def require_suitable(kernels: KernelConfig, compute: ComputeConfig, state_dir: Path) -> Suitability:
    """The way to train with these settings. A model that is not clearly small is planned, which takes seconds.

    Raises BadInput when the device is missing, the model does not fit, or its spill folder can't be used; DiskFull when
    that has too little space.
    """
    from tscale.node.planning.storage import spilled_bytes, vectors_of
    from tscale.node.worker.trainers import arrange

    arrangement = arrange(compute, kernels)
    vectors = vectors_of(kernels.model, kernels.rule.mu != 0)
    spill_dir = Path(compute.spill_dir).expanduser() if compute.spill_dir else state_dir
    needed_bytes = spilled_bytes(vectors, arrangement.spilled)
    if needed_bytes:
        free_bytes = require_folder(spill_dir)
        if free_bytes < needed_bytes:
            raise DiskFull(
                f"{needed_bytes / 1e6:,.4g} MB of the training go to {spill_dir}, where {free_bytes / 1e6:,.4g} MB are "
                f"free: free some, raise compute.ram_bytes, or choose another {SETTING}"
            )
    return Suitability(arrangement, spill_dir, needed_bytes, vectors.stored_bytes)


def require_folder(folder: Path) -> int:
    """The free bytes where `folder` is or would be made. Raises BadInput when nothing can be written there."""
    place = nearest_folder(folder)
    blocking = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if blocking is not None:
        raise BadInput(f"{blocking} is a file, not a folder: choose another {SETTING}")
    try:
        with tempfile.TemporaryFile(dir=place):
            return shutil.disk_usage(place).free
    except OSError as error:
        raise write_error(folder, error, SETTING) from error
