"""Fused group kernel for Hopper GPUs, written in Gluon, and the host code that prepares and launches it."""
