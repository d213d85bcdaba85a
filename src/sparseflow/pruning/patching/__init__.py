"""Token pruning of models of other libraries; see `sparseflow.pruning.patch`."""
