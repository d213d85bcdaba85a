"""AutoSparse Net: a learned cost model that reads a matrix's pattern and ranks schedules by speed.

`coarsen`, `sparse_conv`, `pattern_net`: embedding of the sparsity pattern. `statistics`: features of a task.
`tokenizer`: schedules as tokens. `network`, `losses`: the network and its losses. `scoring`, `pretrained`:
scoring of schedules, network files and the shipped network.
"""
