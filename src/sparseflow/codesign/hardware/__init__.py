"""Hardware: chip types, links between slots, learnable slots, and the proxy that predicts layer costs."""
