"""Token selectors: which tokens a stage keeps.

- `ast`: AST2.0-lite v2, entropies over time, space and regions (kernels in `entropy/`).
- `tome`: token merging.
- `tokens`: token state between blocks, dropping or masking of tokens, and the fixed orders of the random and
  uniform selectors.

The attention selector uses `model.blocks.Attention.compute_received_attention`.
"""
