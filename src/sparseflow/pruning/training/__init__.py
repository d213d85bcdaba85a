"""Training of VideoViT, alone or against baseline token selectors."""
