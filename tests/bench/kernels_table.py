"""Compiles every GPU kernel for every kind of card, without one, and says what came out of it.

    python -m tests.bench.kernels_table            writes docs/results/kernels.md
    python -m tests.bench.kernels_table --check    compares with it instead; exit code 1 when it differs

Takes a minute of processor time. The assemblers and nvdisasm are inside the Triton package.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tscale.kernels.gpu.builds import Build, all_builds

PAGE = Path(__file__).parents[2] / "docs" / "results" / "kernels.md"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LARGEST_SHARED_BYTES = 101_376  # what a block may have on sm_86, sm_89 and sm_120
LARGEST_LDS_BYTES = 65_536
DOUBLE_ROUNDING = re.compile(r"cvt\.\S*e4m3x2\.f16x2")  # float32 to fp16 to e4m3: rounds twice
HEAD = """# GPU kernels, compiled

`python -m tests.bench.kernels_table` made this page with Triton {triton}; no GPU is needed. The tests compile all of it
again and fail when a product misses the fp8 matrix unit, a kernel spills, takes more than {shared} bytes of shared
memory ({lds} on AMD cards), or converts to e4m3 through fp16 (which rounds twice).

RTX 30 (sm_86) has no fp8 unit, so the products do not exist there; everything else is integer, float32 and float64
arithmetic. AMD cards take their products from torch and only the delta encoder from here. It compiles for them; it has
not run on one. Registers are per thread; "spills" counts loads and stores of local memory (LDL, STL) in the machine
code, or on AMD cards the registers that were spilled.

| kernel | target | matrix instruction | registers | spills | shared bytes |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Target:
    """A kind of card. `matrix_unit`: the SASS operation of its fp8 matrix unit, if Triton uses one."""

    name: str
    cards: str
    gpu: GPUTarget
    matrix_unit: str = ""

    @property
    def amd(self) -> bool:
        """Whether it is an AMD card."""
        return self.gpu.backend == "hip"

    def builds(self) -> dict[str, Build]:
        """What a card of this kind runs."""
        if self.amd:
            return {name: build for name, build in all_builds().items() if build.module.endswith("delta_kernels")}
        return {name: build for name, build in all_builds().items() if self.matrix_unit or not build.fp8_units}


TARGETS = (
    Target("sm_86", "RTX 30", GPUTarget("cuda", 86, 32)),
    Target("sm_89", "RTX 40", GPUTarget("cuda", 89, 32), "QMMA"),
    Target("sm_90", "Hopper", GPUTarget("cuda", 90, 32), "QGMMA"),
    Target("sm_120", "RTX 50", GPUTarget("cuda", 120, 32), "QMMA"),
    Target("gfx1100", "RX 7000", GPUTarget("hip", "gfx1100", 32)),
    Target("gfx1201", "RX 9000", GPUTarget("hip", "gfx1201", 32)),
)


@dataclass(frozen=True)
class Compiled:
    """What the machine code of one build for one target has."""

    kernel: str
    target: Target
    matrix_units: tuple[str, ...]  # fp8 matrix operations in the SASS, each once
    registers: int
    spills: int
    shared_bytes: int
    double_rounding: bool = False
    fused_float64: bool = False  # a multiply-add in float64 in the PTX (a division has its own, later)

    def line(self) -> str:
        """The table's row."""
        target = f"{self.target.name} ({self.target.cards})"
        units = ", ".join(self.matrix_units) or "none"
        cells = (self.kernel, target, units, self.registers, self.spills, self.shared_bytes)
        return "| " + " | ".join(map(str, cells)) + " |"


def compile_for(build: Build, target: Target) -> triton.compiler.CompiledKernel:
    """Ahead of time, as a launch with aligned arguments would."""
    function = build.function()
    places = {name: index for index, name in enumerate(function.arg_names)}
    source = ASTSource(
        fn=function,
        signature={name: build.types.get(name, "constexpr") for name in places},
        constexprs={(places[name],): value for name, value in build.constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in build.aligned},
    )
    return triton.compile(source, target=target.gpu, options=dict(build.options))


def measure(name: str, build: Build, target: Target) -> Compiled:
    """Compiles one build and reads its machine code."""
    compiled = compile_for(build, target)
    if target.amd:
        code, shared_bytes = compiled.asm["amdgcn"], compiled.metadata.shared
        registers, vector_spills, scalar_spills = (
            int(re.findall(rf"\.{key}:\s+(\d+)", code)[0])
            for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        )
        return Compiled(name, target, (), registers, vector_spills + scalar_spills, shared_bytes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = _tool("nvdisasm", "-c", file.name)
        usage = _tool("cuobjdump", "-res-usage", file.name)
    ptx = compiled.asm["ptx"]
    return Compiled(
        kernel=name,
        target=target,
        matrix_units=tuple(sorted(set(re.findall(r"\b(QMMA|QGMMA)\b", sass)))),
        registers=int(re.findall(r"REG:(\d+)", usage)[0]),
        spills=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        shared_bytes=compiled.metadata.shared,
        double_rounding=DOUBLE_ROUNDING.search(ptx) is not None,
        fused_float64="fma.rn.f64" in ptx,
    )


def page(rows: list[Compiled]) -> str:
    """The whole of docs/results/kernels.md."""
    kernels = list(all_builds())
    ordered = sorted(rows, key=lambda row: (kernels.index(row.kernel), TARGETS.index(row.target)))
    head = HEAD.format(triton=triton.__version__, shared=LARGEST_SHARED_BYTES, lds=LARGEST_LDS_BYTES)
    return head + "".join(row.line() + "\n" for row in ordered)


def main() -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernels_table", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    check = parser.parse_args().check
    rows = [measure(name, build, target) for target in TARGETS for name, build in target.builds().items()]
    text = page(rows)
    if not check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE.name} is out of date: run python -m tests.bench.kernels_table")


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
