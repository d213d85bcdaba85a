"""Search strategies, tuning sessions and the comparison of searches.

`base`: strategy interface (ask/tell). `random`, `evolutionary`, `annealing`, `qlearning`: strategies.
`guided`: screening by a cost model. `registry`: strategies by name. `rerank`: final measurement of the best
schedules. `session`: one tuning run. `comparison`: searches with and without a cost model.
"""
