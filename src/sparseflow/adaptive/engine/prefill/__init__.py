"""Prefill: from a prompt to a cache slot and the logits of the first token.

- `embedding`: vision encoder and word embeddings
- `split_prefill`: prefill in two parts, with the plan decision in between
- `prefill`: both ways
"""
