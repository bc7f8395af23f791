"""The daemon: transports, worker process, checkpoints, data and the command line."""
