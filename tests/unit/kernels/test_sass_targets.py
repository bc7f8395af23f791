"""Every GPU kernel's machine code, compiled here without a GPU: what a card needs of it, and what the table says."""

import os

import pytest

from tests.helpers.triton_here import require_triton

require_triton()

import triton  # noqa: E402

from tests.bench import kernels_table as table  # noqa: E402
from tscale.kernels.gpu.builds import all_builds, choose_build  # noqa: E402

CASES = [(name, target) for target in table.TARGETS for name in target.builds()]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    assert "TRITON_INTERPRET" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("name", "target"), CASES, ids=lambda value: getattr(value, "name", value))
def test_the_machine_code_is_what_the_card_needs_and_what_the_table_says(name, target):
    build = all_builds()[name]
    compiled = table.measure(name, build, target)
    assert compiled.matrix_units == ((target.matrix_unit,) if build.fp8_units else ())
    assert compiled.spills == 0
    assert 0 < compiled.registers <= 256
    assert compiled.shared_bytes <= (table.LARGEST_LDS_BYTES if target.amd else table.LARGEST_SHARED_BYTES)
    assert not compiled.double_rounding
    if not build.fusion:
        assert not compiled.fused_float64
    page = table.PAGE.read_text()
    if f"Triton {triton.__version__};" in page:  # another version of Triton gives other registers
        assert compiled.line() in page.splitlines(), "run python -m tests.bench.kernels_table"


def test_the_table_has_these_rows_and_no_other():
    rows = [line.split(" | ")[:2] for line in table.PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    expected = {(f"| {name}", f"{target.name} ({target.cards})") for name, target in CASES}
    assert len(rows) == len(expected) and {(row[0], row[1]) for row in rows} == expected


def test_the_checks_can_fail():
    """A fused multiply-add and a conversion that rounds twice are seen where they are."""
    fused = choose_build()
    object.__setattr__(fused, "options", {**fused.options, "enable_fp_fusion": True})
    assert table.measure("delta magnitudes", fused, table.TARGETS[1]).fused_float64
    assert table.DOUBLE_ROUNDING.search("cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r2;")
