"""Training of the controllers: imitation of the oracle, then GRPO.

- `grpo`: loss, reward and constraint multiplier
- `config`: settings
- `joint`: one step of both stages
- `train`: the training loop
"""
