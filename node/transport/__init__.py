"""How frames travel between peers: libp2p, and an in-memory twin with faults."""
