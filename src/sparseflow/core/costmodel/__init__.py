"""Learned cost models: tree ensembles, cross-validation splits and conformal intervals."""
