"""What can go wrong in the codec."""


class CodecError(ValueError):
    """A blob that isn't a well-formed contribution for this layout, or a residual that can't be encoded."""
