"""What `tscale-node bench` prints, and the units of its figures."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tscale.node.cli.app import run_command
from tscale.node.cli.figures import figure_lines


def test_bench_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}
    module = types.ModuleType("tscale.node.bench.codec")

    def run_codec_bench(**kwargs: Any) -> dict[str, float | None]:
        asked.update(kwargs)
        return {"bits_per_parameter": 0.151, "encode_params_per_s": 31_234_567.0, "torch_topk_params_per_s": None}

    module.run_codec_bench = run_codec_bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tscale.node.bench.codec", module)
    assert run_command(["bench", "codec", "--parameters", "1000", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["bits_per_parameter"] == 0.151
    assert asked == {"parameters": 1000, "density": 1 / 64}
    assert "1,000 parameters" in captured.err
    assert run_command(["bench", "codec"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "bits per parameter  0.151                      of what is sent",
        "encode              31.2 million parameters/s  compressing, on one thread",
        "torch topk          -                          only choosing the largest values with torch.topk",
    ]


def test_a_measurement_without_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    module = types.ModuleType("tscale.node.bench.codec")

    def run_codec_bench(**_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    module.run_codec_bench = run_codec_bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tscale.node.bench.codec", module)
    assert run_command(["bench", "codec", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "tscale-node: there is not enough memory for this: use smaller sizes" in said.err


def test_figures_have_their_units() -> None:
    measured = {"blob_bytes": 34_100, "decode_s": 0.01234, "ratios": [0.97, 1.25], "memory_read_bytes_per_s": 5.2e9}
    assert figure_lines({**measured, "node_tokens_per_s": 23_362.4, "up_bps": 8e6, "threads": 12_000}) == [
        "blob         34.1 kB",
        "decode       0.0123 s",
        "ratios       0.97, 1.25",
        "memory read  5.2 GB/s",
        "node         23,362 tokens/s",
        "up           1.0 MB/s",
        "threads      12,000",
    ]
