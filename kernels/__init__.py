"""Tensors: model, inner optimizer, delta codec, fold. No sockets, no peers, no clock."""
