"""What a machine can train: memory, time and traffic of a model, and the first thing that does not fit."""
