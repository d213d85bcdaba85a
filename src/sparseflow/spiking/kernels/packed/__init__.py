"""One-bit spikes on a GPU: their format, the fused group kernels, and what converts and pools them."""
