"""The cluster's side of lazy tensors: what runs torch."""
