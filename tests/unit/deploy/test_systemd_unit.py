"""The systemd unit of a seed: systemd accepts it, and it gives up where trying again would not help."""

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tscale.protocol.errors import StopNode

UNIT = Path(__file__).parents[3] / "deploy" / "tscale-seed.service"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser["Service"]


def test_it_does_not_restart_after_an_error_that_a_person_must_mend() -> None:
    # only the tree itself: what other tests import may have subclasses of its own
    codes = {kind.exit_code for kind in StopNode.__subclasses__() if kind.__module__ == StopNode.__module__}
    assert {int(code) for code in service()["RestartPreventExitStatus"].split()} == codes
    assert 1 not in codes


def test_it_gives_the_node_its_ten_seconds_and_names_both_settings() -> None:
    section = service()
    assert float(section["TimeoutStopSec"]) > 10
    example = (UNIT.parent / "seed.env.example").read_text(encoding="utf-8")
    for name in ("TSCALE_SWARM", "TSCALE_PORT"):
        assert f"${{{name}}}" in section["ExecStart"]
        assert f"\n{name}=" in example


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_accepts_every_line(tmp_path: Path) -> None:
    command = tmp_path / ".local" / "bin" / "tscale-node"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n", encoding="utf-8")
    command.chmod(0o755)
    ended = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", "--recursive-errors=yes", str(UNIT)],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
