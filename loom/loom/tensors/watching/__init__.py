"""Weights and gradients that are watched while they are trained."""
