"""The tscale-node command line."""
