"""Analysis of a network: which convolutions read spikes, and which layers form a fusable group."""
