"""Search strategies, tuning sessions and the comparison of searches.

`base`: strategy interface (ask/tell) and random search. `evolutionary`, `annealing`, `qlearning`: strategies.
`guided`: screening by a cost model. `session`: one tuning run, and strategies by name. `rerank`: final
measurement of the best schedules. `comparison`: searches with and without a cost model.
"""
