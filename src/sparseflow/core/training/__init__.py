"""Training loop shared by all wings.

Modules: `loop` (`fit`), `optimizer` (learning rate, weight decay, finite check), `distributed` (processes of
torchrun), `checkpoint`, `history`, `grid` (one training per configuration, seed and fold), `epoch_trainer`
(protocol of a training that an outer loop drives).
"""
