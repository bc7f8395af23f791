"""The spawned training process and its supervision."""
