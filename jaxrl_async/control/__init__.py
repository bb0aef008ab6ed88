"""Policies of observations, trained in Gymnasium's environments."""
