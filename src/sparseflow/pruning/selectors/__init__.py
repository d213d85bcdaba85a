"""Token selectors: which tokens a stage keeps.

- `ast`: AST2.0-lite v2, entropies over time, space and regions (kernels in `entropy/`).
- `change`: frame difference and EVS.
- `tome`: token merging.
- `partial_grid`: scores of tokens of which an earlier stage dropped some.
- `tokens`: token state between blocks, dropping or masking of tokens, and the fixed orders of the random and
  uniform selectors.

The selectors by attention use methods of `model.blocks.Attention`.
"""
