"""Numba's cache notices that a function's own file changed, not that a file did whose functions are compiled into it.

Where code is updated in place, a peer would go on with the old machine code and fold to other bits than the others. So
a file that calls compiled functions of another one names the other's digest: then both change together.
"""

import ast
from pathlib import Path

import pytest
from blake3 import blake3

import tscale.kernels.codec.fast_add

ROOT = Path(tscale.kernels.codec.fast_add.__file__).parent.parent
PREFIX = "tscale.kernels."
COMPILED = sorted(path for path in ROOT.rglob("*.py") if "@njit(cache=True" in path.read_text())


def compiled_imports(path: Path) -> list[Path]:
    """The files with compiled functions that a file imports from."""
    modules = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    named = [ROOT / (module.removeprefix(PREFIX).replace(".", "/") + ".py") for module in modules]
    return sorted({found for found in named if found in COMPILED})


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_a_file_names_the_digests_of_the_compiled_ones_it_calls(path: Path) -> None:
    for other in compiled_imports(path):
        line = f"# numba's cache doesn't see changes in {other.name}: {blake3(other.read_bytes()).hexdigest(length=4)}"
        assert line in path.read_text().splitlines(), f"{other.name} changed: {path.name} needs the line {line!r}"


def test_the_files_that_call_others_are_found() -> None:
    found = {path.stem: [other.stem for other in compiled_imports(path)] for path in COMPILED}
    assert found["fold_fast"] == ["fast_add"] and found["screen_fast"] == ["fast_add", "fold_fast"]
    assert found["fast"] == ["fast_select"] and found["fast_add"] == []
