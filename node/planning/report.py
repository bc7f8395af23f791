"""A plan with its traffic, in numbers for scripts and in lines for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tscale.kernels.offload.memory import StepShape
from tscale.node.planning.machine import Machine
from tscale.node.planning.planner import TrainingPlan
from tscale.node.planning.storage import DoesNotFit
from tscale.protocol.ladder import bits_per_parameter, choose_rung
from tscale.protocol.spec import SwarmSpec

STEPS_A_ROUND = 30
"""Inner steps that a round should have at least (MuLoCo's published setting)."""
CONTRIBUTION_SHARE = 0.1
"""Of a round, that sending one contribution may take."""
LONGER_ROUNDS = "--round-seconds of `tscale-node create`"
"""Where a swarm's rounds are chosen."""


@dataclass(frozen=True)
class Traffic:
    """What a round moves: `rung` is the density that `peers` such peers would send with at `upload_bits_per_s`."""

    rung: str
    contribution_bytes: int
    upload_s: float
    round_bytes: int
    round_s: float
    least_round_s: float


def plan_traffic(spec: SwarmSpec, plan: TrainingPlan, machine: Machine, peers: int) -> Traffic:
    """The contribution, and how long a round has to be: for its steps, and for everybody's contributions."""
    rungs = spec.codec.rungs
    shared = max(peers, 2)  # a lone peer's contribution travels nowhere
    rung = rungs[choose_rung(spec, plan.parameters, shared, machine.upload_bits_per_s)]
    size_bytes = int(bits_per_parameter(rung) * plan.parameters / 8)
    upload_s = 8 * size_bytes / machine.upload_bits_per_s
    sparsest = min(bits_per_parameter(r) for r in rungs if not r.lone_only) * plan.parameters
    carrying_s = 2 * shared * sparsest / machine.upload_bits_per_s
    least_s = max(plan.step.seconds * STEPS_A_ROUND, upload_s / CONTRIBUTION_SHARE, carrying_s)
    return Traffic(rung.name, size_bytes, upload_s, (shared - 1) * size_bytes, spec.rounds.length_s, least_s)


def find_round_fault(plan: TrainingPlan, traffic: Traffic) -> str:
    """What of the spec's round this machine can't keep up with, and what to change; empty when it can."""
    if plan.step.seconds > traffic.round_s:
        return (
            f"a round of {seconds(traffic.round_s)} is shorter than one step ({seconds(plan.step.seconds)}): "
            f"make rounds longer ({LONGER_ROUNDS}), or take a smaller model"
        )
    if traffic.upload_s > traffic.round_s:
        return (
            f"sending a contribution takes {seconds(traffic.upload_s)}, a round {seconds(traffic.round_s)}: "
            f"make rounds longer ({LONGER_ROUNDS}), or find a faster uplink"
        )
    return ""


def as_json(plan: TrainingPlan, traffic: Traffic, machine: Machine, shape: StepShape) -> dict[str, Any]:
    """All figures of a plan that fits."""
    fault = find_round_fault(plan, traffic)
    return {
        "fits": not fault,
        "problem": fault,
        "machine": machine.name,
        "rates": machine.rates,
        "parameters": plan.parameters,
        "batch": shape.rows,
        "context": shape.context,
        "layer_major": plan.layer_major,
        "slots": plan.offload.slots,
        "micro_batch": plan.offload.micro_rows,
        "boundary": plan.offload.boundary,
        "recompute": plan.offload.recompute,
        "device_bytes": plan.memory.device_bytes,
        "ram_bytes": plan.memory.ram_bytes,
        "disk_bytes": plan.memory.disk_bytes,
        "on_disk": plan.memory.spilled,
        "step_s": plan.step.seconds,
        "compute_s": plan.step.compute_s,
        "copy_s": plan.step.copy_s,
        "disk_s": plan.step.disk_s,
        "tokens_per_s": shape.rows * shape.context / plan.step.seconds,
        "rung": traffic.rung,
        "contribution_bytes": traffic.contribution_bytes,
        "contribution_upload_s": traffic.upload_s,
        "round_s": traffic.round_s,
        "recommended_round_s": traffic.least_round_s,
    }


def as_lines(found: dict[str, Any], machine: Machine) -> list[str]:
    """The plan for people."""
    on_card = machine.device_bytes is not None
    layers = "all layers" if not found["recompute"] else f"{found['slots']} slots for layers"
    at_once = f"{layers}, {found['micro_batch']} of {found['batch']} sequences of {found['context']} tokens at a time"
    lines = [f"model     {found['parameters'] / 1e6:,.4g}M parameters"]
    if on_card:
        assert machine.device_bytes is not None
        there = f"{gigabytes(machine.device_bytes)} ({machine.name})"
        lines.append(f"card      {gigabytes(found['device_bytes'])} of {there}: {at_once}")
    elif found["layer_major"]:
        lines.append(f"processor one layer after the other, {at_once}")
    spilled = f", {found['on_disk']} included" if found["on_disk"] else ""
    free = " (not checked: give --disk)" if machine.disk_bytes is None else f" of {gigabytes(machine.disk_bytes)} free"
    lines += [
        f"memory    {gigabytes(found['ram_bytes'])} of {gigabytes(machine.ram_bytes)}",
        f"disk      {gigabytes(found['disk_bytes'])}{free}{spilled}",
        f"step      {seconds(found['step_s'])} for {found['batch'] * found['context']:,} tokens, "
        f"{found['tokens_per_s']:,.0f} tokens/s (speed {found['rates']})",
        f"send      {found['contribution_bytes'] / 1e6:,.3g} MB a round at {found['rung']}, "
        f"{seconds(found['contribution_upload_s'])} at {machine.upload_bits_per_s / 1e6:.3g} Mbit/s",
        f"round     {seconds(found['round_s'])} in the preset, {seconds(found['recommended_round_s'])} or more suit it",
    ]
    lines.append(f"does not fit: {found['problem']}" if found["problem"] else _verdict(found))
    return lines


def _verdict(found: dict[str, Any]) -> str:
    if found["recommended_round_s"] <= found["round_s"]:
        return "fits"
    return f"fits, with rounds of {seconds(found['recommended_round_s'])} or more ({LONGER_ROUNDS})"


def missing_as_json(missing: DoesNotFit, machine: Machine) -> dict[str, Any]:
    """What does not fit, for scripts."""
    return {
        "fits": False,
        "problem": missing_as_line(missing),
        "machine": machine.name,
        "missing": missing.what,
        "needed_bytes": missing.needed_bytes,
        "available_bytes": missing.available_bytes,
    }


def missing_as_line(missing: DoesNotFit) -> str:
    """What does not fit, for people."""
    needed, there = gigabytes(missing.needed_bytes), gigabytes(missing.available_bytes)
    if needed == there:  # rounded away
        needed, there = (f"{size:,} bytes" for size in (missing.needed_bytes, missing.available_bytes))
    return f"{missing.what}: {needed} are needed, {there} are there: {missing.advice}"


def gigabytes(size_bytes: int) -> str:
    """Decimal gigabytes, as on the box; megabytes or kilobytes where that is more readable."""
    if size_bytes < 100e6:
        return f"{size_bytes / 1e6:,.3g} MB" if size_bytes >= 100e3 else f"{size_bytes / 1e3:,.3g} kB"
    return f"{size_bytes / 1e9:,.0f} GB" if size_bytes >= 100e9 else f"{size_bytes / 1e9:,.3g} GB"


def seconds(duration_s: float) -> str:
    """Whole seconds from ten on, else three digits."""
    return f"{duration_s:,.0f} s" if duration_s >= 10.0 else f"{duration_s:.3g} s"
