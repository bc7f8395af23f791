"""Which chunk coder runs: the numba twin where it can be imported, else the plain reference. "triton" is a GPU's."""

from types import ModuleType

from tscale.kernels.codec import reference

IMPLEMENTATIONS = ("auto", "reference", "numba", "triton")


def chunk_coder(impl: str) -> ModuleType:
    """The module with `encode_chunks` and `expand_positions`; "numba" raises ImportError where numba is missing.

    "triton" raises when it encodes: ImportError without Triton, RuntimeError without a GPU.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, not {impl!r}")
    if impl == "reference":
        return reference
    if impl == "triton":
        from tscale.kernels.gpu import delta

        return delta
    try:
        from tscale.kernels.codec import fast
    except (ImportError, RuntimeError):  # numba raises RuntimeError when it finds no place for its cache
        if impl == "numba":
            raise
        return reference
    return fast
