"""The controller on a virtual clock: faults, invariants, predicted speed."""
