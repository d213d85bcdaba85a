"""Compact models: removal of pruned units, FLOPs, costs of layers, layer-wise execution, and files."""
