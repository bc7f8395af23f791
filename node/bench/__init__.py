"""Benchmarks anyone can rerun: tscale-node bench."""
