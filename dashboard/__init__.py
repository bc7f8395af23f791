"""Read-only web page over a status snapshot. Own process; no torch, no hivemind."""
