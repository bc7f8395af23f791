"""The doctor's verdicts: what is fine, what is not, and that a broken check does not break the others."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.precision import capabilities, selftest
from tscale.kernels.precision.capabilities import Capabilities
from tscale.node import doctor
from tscale.node.cli.app import run_command
from tscale.node.config import ComputeConfig
from tscale.node.doctor import (
    DoctorOptions,
    Verdict,
    check_clock,
    check_codec,
    check_data,
    check_disk,
    check_gpu,
    check_limits,
    check_precision,
    check_state_dir,
    check_training,
    run_doctor,
)
from tscale.node.planning.storage import SPILL_ALL
from tscale.node.worker import kernel_config, trainers
from tscale.node.worker.trainers import Arrangement
from tscale.protocol.errors import BadInput, DiskFull


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


def test_limits_that_are_not_this_machines_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_config, "training_machine", lambda device: Capabilities())
    assert check_limits(ComputeConfig()) == Verdict("limits", "ok", "no spill folder is set")
    assert f"{tmp_path / 'new'} can be written" in check_limits(ComputeConfig(spill_dir=str(tmp_path / "new"))).seen
    assert not (tmp_path / "new").exists()
    wrong = check_limits(ComputeConfig(ram_bytes=10**15, vram_bytes=10**10))
    assert wrong.level == "warn" and wrong.advice == "correct it below [compute] in the config"
    assert "ram_bytes is 1e+06 GB and the machine has" in wrong.seen
    assert "vram_bytes is set and no card is used" in wrong.seen
    card = Capabilities("cuda", "card", memory_bytes=8 * 10**9)
    monkeypatch.setattr(kernel_config, "training_machine", lambda device: card)
    assert "vram_bytes is 10 GB and the card has 8 GB" in check_limits(ComputeConfig(vram_bytes=10**10)).seen
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match="file is a file, not a folder: choose another compute.spill_dir"):
            check_limits(ComputeConfig(spill_dir=str(place)))


def test_the_training_of_a_model_is_checked_with_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = DoctorOptions(tmp_path, "", 0, model="nano")
    assert check_training(options) == Verdict("training", "ok", "nano on the processor")
    slots = replace(options, compute=ComputeConfig(offload_slots=2))
    assert "nano on the processor, 2 slots for layers" in check_training(slots).seen
    with pytest.raises(BadInput, match="main memory: 1.47 GB are needed, 1 GB are there"):
        check_training(replace(options, compute=ComputeConfig(ram_bytes=10**9)))

    def usage(free_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))

    usage(10**6)
    short = check_training(options)
    assert short.level == "fail" and "3.44 MB of disk are needed, 1 MB are free" in short.seen
    usage(10**5)
    found = Arrangement(Capabilities(), OffloadPlan(2, 4, "device"), SPILL_ALL)
    monkeypatch.setattr(trainers, "arrange", lambda *_: found)
    spilling = ComputeConfig(spill_dir=str(tmp_path / "spill"))
    with pytest.raises(DiskFull, match=r"MB of the training go to .*spill, where 0.1 MB are free: free some"):
        check_training(replace(options, compute=spilling))
    usage(4 * 10**6)  # enough for the node's files or for the spill, which are on one disk
    assert check_training(replace(options, compute=spilling)).level == "fail"
    usage(10**7)
    assert check_training(replace(options, compute=spilling)).seen.endswith("optimizer and weights on disk")


def test_an_unknown_model_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--model", "nono", "--state-dir", str(tmp_path)]) == 2
    assert "there is no model 'nono': choose one of" in capsys.readouterr().err


def test_state_folder_is_tried_and_not_made_and_a_file_in_its_place_is_a_failure(tmp_path: Path) -> None:
    assert check_state_dir(tmp_path / "a" / "b") == Verdict("state folder", "ok", str(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        verdict = check_state_dir(place)
        assert (verdict.level, verdict.seen) == ("fail", f"{place}: {tmp_path / 'file'} is a file, not a folder")
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

    def short() -> Verdict:
        raise MemoryError

    monkeypatch.setattr(doctor, "check_torch", broken)
    monkeypatch.setattr(doctor, "check_codec", short)
    monkeypatch.setattr(doctor, "check_network", lambda host: Verdict("network", "ok", "stub"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        verdicts = {item.check: item for item in run_doctor(DoctorOptions(tmp_path, "127.0.0.1", port))}
    assert verdicts["port"].level == "fail"
    assert str(port) in verdicts["port"].seen
    assert (verdicts["codec"].level, verdicts["codec"].seen) == ("fail", "there is not enough memory")
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
