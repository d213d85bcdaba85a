"""Spiking ResNets: architectures, pretrained networks and the registry of networks by name."""
