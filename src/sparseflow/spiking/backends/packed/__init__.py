"""GPU backend: one-bit spikes, fused group kernels, and the kernels that convert and pool packed spikes."""
