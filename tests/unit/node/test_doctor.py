"""The doctor's verdicts: what is fine, what is not, and that a broken check does not break the others."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tscale.kernels.precision import capabilities, selftest
from tscale.kernels.precision.capabilities import Capabilities
from tscale.node import doctor
from tscale.node.cli.app import run_command
from tscale.node.doctor import (
    DoctorOptions,
    Verdict,
    check_clock,
    check_codec,
    check_data,
    check_disk,
    check_gpu,
    check_precision,
    check_state_dir,
    run_doctor,
)
from tscale.node.worker import kernel_config


def test_shipped_text_and_codec_are_right_here() -> None:
    assert check_data().level == "ok"
    assert check_codec().level == "ok"


def test_the_precision_is_named_and_a_step_down_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_precision("auto") == Verdict("precision", "ok", "fp32: CPU: a CPU multiplies float32 fastest")
    assert check_precision("fp8").seen == "fp8-block (emulation): fp8 was asked for"
    monkeypatch.setattr(kernel_config, "training_machine", lambda device: Capabilities("mps", "Apple GPU"))
    refused = check_precision("fp8")
    assert (refused.level, refused.seen) == ("warn", "fp32: Apple GPU has no units for fp8")
    assert "[training]" in refused.advice

    def broken(*_: object) -> str:
        return "the product is off by 0.5 of its size"

    monkeypatch.setattr(kernel_config, "training_machine", lambda device: Capabilities())
    monkeypatch.setattr(selftest, "product_fault", broken)
    stepped = check_precision("fp8")
    assert stepped.level == "warn" and stepped.seen.startswith("fp32: fp8 was asked for; fp8-block (emulation) failed")


def test_a_gpu_is_named_with_what_is_right_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_gpu() == Verdict("gpu", "ok", "none that torch can use")
    monkeypatch.setattr(capabilities, "probe", lambda: Capabilities("mps", "Apple GPU"))
    assert check_gpu() == Verdict("gpu", "ok", "fp32: Apple GPU: no units for shorter formats are known")


def test_state_folder_is_made_and_a_file_in_its_place_is_a_failure(tmp_path: Path) -> None:
    assert check_state_dir(tmp_path / "a" / "b") == Verdict("state folder", "ok", str(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    verdict = check_state_dir(tmp_path / "file")
    assert verdict.level == "fail"
    assert "--state-dir" in verdict.advice


@pytest.mark.parametrize(("free_bytes", "level"), [(1 << 20, "fail"), (1 << 30, "warn"), (1 << 40, "ok")])
def test_disk_is_judged_where_the_folder_will_be(
    free_bytes: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=free_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert check_disk(tmp_path / "not" / "yet").level == level
    assert asked == [tmp_path]


def test_a_clock_before_this_program_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_clock(0.0).level == "fail"
    monkeypatch.setattr(doctor, "_clock_is_synchronised", lambda: False)
    assert check_clock(1_800_000_000.0).level == "warn"
    monkeypatch.setattr(doctor, "_clock_is_synchronised", lambda: None)
    assert check_clock(1_800_000_000.0) == Verdict("clock", "ok", "2027-01-15 08:00:00 UTC")


def test_a_taken_port_and_a_check_that_breaks_are_failures_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Verdict:
        raise RuntimeError("no library")

    monkeypatch.setattr(doctor, "check_torch", broken)
    monkeypatch.setattr(doctor, "check_network", lambda host: Verdict("network", "ok", "stub"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        verdicts = {item.check: item for item in run_doctor(DoctorOptions(tmp_path, "127.0.0.1", port))}
    assert verdicts["port"].level == "fail"
    assert str(port) in verdicts["port"].seen
    assert verdicts["torch"].level == "fail"
    assert "RuntimeError: no library" in verdicts["torch"].seen
    assert verdicts["network"].level == "ok"


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_is_1_only_for_a_failure(
    level: doctor.Level, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(
        "tscale.node.cli.doctor.run_doctor", lambda options: iter([Verdict("disk", level, "seen", "do this")])
    )
    assert run_command(["doctor", "--json", "--state-dir", str(tmp_path)]) == code
    assert json.loads(capsys.readouterr().out) == {
        "ok": code == 0,
        "checks": [{"check": "disk", "level": level, "seen": "seen", "advice": "do this"}],
    }
    assert run_command(["doctor", "--state-dir", str(tmp_path)]) == code
    assert "disk: seen -> do this" in capsys.readouterr().out
