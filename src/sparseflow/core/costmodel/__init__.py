"""Learned cost models: features, tree ensembles, cross-validation, conformal intervals, ranking metrics."""
