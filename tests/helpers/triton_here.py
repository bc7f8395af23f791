"""Whether Triton can be used here: a plain reason to skip, or a failure where the `dev` extra brings it."""

import platform
import sys
from importlib.util import find_spec

import pytest


def require_triton() -> None:
    """Skips the module where there is no Triton for this platform; fails on Linux x86_64, where `dev` installs it."""
    if find_spec("triton") is not None:
        return
    if sys.platform == "linux" and platform.machine() == "x86_64":
        pytest.fail("triton is missing: install the `dev` extra", pytrace=False)
    pytest.skip("no triton for this platform", allow_module_level=True)
