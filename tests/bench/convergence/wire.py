"""What a round costs on the wire: the table of presets and densities, computed from the presets and the ladder."""

from __future__ import annotations

from pathlib import Path

from tests.bench.convergence.page import BYTES, fill, has_place
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.hashing import BlobRef
from tscale.protocol.ladder import UPLINK_SHARE, bits_per_parameter
from tscale.protocol.presets import preset
from tscale.protocol.spec import NO_OWNER, RungSpec, SwarmSpec

SIZES = ("demo", "tiny", "125m", "350m", "1.5b")
HEADER = "| preset | parameters | round | rung | bits/parameter | a contribution | at 20 Mbit/s | peers that fit |"
UPLOAD_BPS = 20e6


def table() -> str:
    """A row for every preset and rung: what one peer sends in a round, and how long a home uplink takes for it.

    "Peers that fit" is the largest swarm whose contributions of this rung fit that uplink; the ladder takes the densest
    rung that fits.
    """
    rows = [_row(name, spec, rung) for name in SIZES for spec in [_spec(name)] for rung in spec.codec.rungs]
    return "\n".join((HEADER, "|---" * (HEADER.count("|") - 1) + "|", *rows))


def write_into(page: Path) -> None:
    """Replaces what is between the page's markers, if it has them."""
    if has_place(page, BYTES):
        fill(page, BYTES, table())


def _spec(name: str) -> SwarmSpec:
    return preset(name, data=(BlobRef(bytes(32), 1),), owner=NO_OWNER, t0_unix_s=0.0)


def _row(name: str, spec: SwarmSpec, rung: RungSpec) -> str:
    parameters = kernel_config(spec).layout.numel
    bits = bits_per_parameter(rung) * parameters
    budget = UPLOAD_BPS * spec.rounds.length_s * UPLINK_SHARE
    cells = (
        name,
        f"{parameters / 1e6:,.3g}M" if parameters < 1e9 else f"{parameters / 1e9:.3f}B",
        f"{spec.rounds.length_s:g} s",
        rung.name,
        f"{bits_per_parameter(rung):.3g}",
        "never sent" if rung.lone_only else _size(bits / 8),
        "" if rung.lone_only else _seconds(bits / UPLOAD_BPS),
        "1" if rung.lone_only else f"{min(int(budget // bits), spec.rounds.max_contributions)}",
    )
    return f"| {' | '.join(cells)} |"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e3:.3g} kB" if size_bytes < 1e6 else f"{size_bytes / 1e6:.3g} MB"


def _seconds(time_s: float) -> str:
    return f"{time_s:.0f} s" if time_s >= 10 else f"{time_s:.2g} s" if time_s >= 0.1 else f"{1e3 * time_s:.2g} ms"
