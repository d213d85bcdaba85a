"""Execution of an analyzed network: plan, group steps, spike tensors, CUDA graphs and sparse modules."""
