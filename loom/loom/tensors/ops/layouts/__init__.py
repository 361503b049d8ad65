"""Shapes, orders of dimensions, parts of tensors, and tensors put together."""
