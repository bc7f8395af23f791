"""The delta codec: top-k with sign and magnitude bits, entropy-coded positions."""
