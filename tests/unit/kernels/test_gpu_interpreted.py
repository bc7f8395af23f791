"""Runs the tests in `interpreted/` under Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, and ahead-of-time compilation needs it unset: hence the processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.triton_here import require_triton

require_triton()

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("interpreted_*.py")), ids=lambda path: path.stem)
def test_kernels_equal_the_plain_references(path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    arguments = ["-o", "python_files=interpreted_*.py", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env={**kept, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and " skipped" not in run.stdout
