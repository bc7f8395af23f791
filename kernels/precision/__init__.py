"""In which precision a machine multiplies: chosen from its capabilities, tested at start, a local matter of a peer."""
