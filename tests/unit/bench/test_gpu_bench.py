"""The script for a borrowed GPU, as far as it runs without one."""

import subprocess
import sys

import pytest
import torch

from tests.bench.gpu import failures, page
from tests.bench.gpu_training import Run, Work, overlap, train
from tscale.kernels.model_config import PRESETS, model_layout
from tscale.kernels.offload.transfer import DirectTransfer
from tscale.kernels.precision.select import Backend, PrecisionPath


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing():
    run = subprocess.run([sys.executable, "-m", "tests.bench.gpu"], capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("no GPU here") and run.stderr.count("\n") == 1


@pytest.mark.parametrize("slots", [None, 2])
def test_training_runs_with_the_cpu_as_the_device(slots):
    work = Work(PRESETS["demo"], rows=2, micro_rows=1, context=16)
    flat = torch.empty(model_layout(work.model).numel).normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    run = Run("emulated", PrecisionPath.FP8_BLOCK, Backend.EMULATION, slots)
    result = train(work, DirectTransfer(), run, flat.numpy())
    assert len(result["losses"]) == 4 and result["losses"][3] < result["losses"][0] < 40
    assert result["tokens_per_s"] > 0 and "peak_bytes" not in result


def test_overlap_is_the_hidden_share_of_the_busier_direction():
    resident = {"step_s": 1.0}
    offloaded = {"step_s": 1.1, "to_device_bytes": 10_000, "to_host_bytes": 4_000}
    assert overlap(resident, offloaded, 25_000.0) == {"copy_s": 0.4, "hidden": 0.75, "times_resident": 1.1}
    assert overlap(resident, {**offloaded, "step_s": 9.0}, 25_000.0)["hidden"] == 0.0
    assert overlap(resident, {**offloaded, "to_device_bytes": 0, "to_host_bytes": 0}, 25_000.0)["hidden"] == 1.0


def test_a_kernel_that_differs_is_named_and_nan_is_no_success():
    found = {"e4m3 encode": 0, "product, relative error": 1e-6, "delta encoder": 1}
    assert failures(found) == ["delta encoder"]
    assert failures({"product, relative error": float("nan")}) == ["product, relative error"]


def test_the_page_has_the_figures_and_where_they_are_from():
    text = page({"device": "Made Up 1", "capability": "8.9", "torch": "2", "seconds": 1.5}, "2026-12-01")
    assert "Made Up 1" in text and "2026-12-01" in text and '"seconds": 1.5' in text
