"""Neurons of spikingjelly, snnTorch, norse and sinabs: their outputs, state and dynamics by class name."""
