"""Bytes and time-as-an-argument: identities, records, manifests, the round. Pure: no I/O, no torch."""
