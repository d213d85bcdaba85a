"""Cost models of schedules and their evaluation.

`block_counts`, `features`, `cost_model`: boosted trees that learn during a search. `net`: AutoSparse Net.
`dataset`, `training`: its training. `ranking`, `tree_baseline`, `comparison`: its evaluation.
"""
