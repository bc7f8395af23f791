"""Which chunk coder runs: the numba twin where it can be imported, else the plain reference."""

from types import ModuleType

from tscale.kernels.codec import reference

IMPLEMENTATIONS = ("auto", "reference", "numba")


def chunk_coder(impl: str) -> ModuleType:
    """The module with `encode_chunks` and `expand_positions`; "numba" raises ImportError where numba is missing."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, not {impl!r}")
    if impl == "reference":
        return reference
    try:
        from tscale.kernels.codec import fast
    except (ImportError, RuntimeError):  # numba raises RuntimeError when it finds no place for its cache
        if impl == "numba":
            raise
        return reference
    return fast
