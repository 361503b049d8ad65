"""The laptop's side of the weaver: views of replicas and devices, and commands to them."""
