"""Estimators: the fit loop, learned state, serving, model files and checkpoints."""
