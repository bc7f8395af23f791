"""`tscale-node plan` as a person and a script see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tscale.node.cli.app import run_command


@pytest.fixture(autouse=True)
def _no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def plan(tmp_path: Path, *words: str) -> int:
    return run_command(["plan", *words, "--state-dir", str(tmp_path / "state")])


def test_what_fits_is_told_and_the_code_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--model", "nano", "--vram", "2GB", "--ram", "8GB") == 0
    told = capsys.readouterr()
    assert told.err == "" and told.out.splitlines()[-1] == "fits"
    assert "of 2 GB (a card with 2 GB): all layers, 4 of 4 sequences of 32 tokens at a time" in told.out
    assert "speed assumed: give --tflops for yours" in told.out


def test_what_does_not_fit_is_told_for_people_and_scripts_and_the_code_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "--model", "nano", "--vram", "500MB", "--ram", "8GB", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["missing"], found["available_bytes"]) == (False, "memory of the card", 500_000_000)
    assert found["needed_bytes"] > 700 << 20 and found["problem"].startswith("memory of the card: 0.73")
    assert plan(tmp_path, "--model", "nano", "--disk", "1kB") == 1
    assert capsys.readouterr().out.startswith("does not fit: disk: 3.44 MB are needed, 1 kB are there: free space")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "9b"), "there is no model '9b'"),
        (("--model", "tscale://ours-aa?seed=x"), "a model is named, not given as a link or a file: choose one of 1.5b"),
        (("--model", "nano", "--peers", "10001"), "Invalid value for '--peers'"),
        (("--model", "nano", "--upload", "20"), "--upload is a rate with its unit, like 20Mbit, not '20'"),
        (("--model", "nano", "--vram", "big"), "--vram is a size like 12GB or 24GiB, not 'big'"),
        (("--model", "nano", "--upload", "0"), "--upload is a rate like 20Mbit, not '0'"),
        (("--model", "nano", "--peers", "0"), "Invalid value for '--peers'"),
        ((), "Missing option '--model'"),
    ],
)
def test_bad_input_is_one_line_and_the_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert plan(tmp_path, *words) == 2
    told = capsys.readouterr()
    assert told.out == "" and message in told.err and len(told.err.splitlines()) == 1
