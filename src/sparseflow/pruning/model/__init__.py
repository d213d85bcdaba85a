"""VideoViT: configuration, transformer blocks, gates, the model and pretrained weights."""
