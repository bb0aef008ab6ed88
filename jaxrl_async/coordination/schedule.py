"""Whether groups can all be trained by their deadlines, P of them a step.

Let d_0 <= d_1 <= ... be the deadlines of the groups. They are schedulable at
step s if

  d_j >= s + j // P   for every j.

This means: if every step from s on takes the P groups with the oldest
deadlines, then no group is taken by a step after its deadline.

Counts. Let n(d) be the number of groups whose deadline is d or earlier. The
groups are schedulable at s if and only if

  n(d) <= (d - s + 1) * P   for every deadline d that occurs,

that is, if the groups that are due by d fit into the steps s to d. Proof: the
last group with deadline d has j = n(d) - 1. For integers, d >= s + j // P is
equivalent to j < (d - s + 1) * P. The other groups with this deadline have a
smaller j. The buffer therefore counts its groups by deadline and decides from
these counts (`fits`). `is_schedulable` is the definition, and the tests compare
the two.
"""

from collections.abc import Iterable, Mapping


def is_schedulable(
  deadlines: Iterable[int], step: int, groups_per_step: int
) -> bool:
  """Return whether d_j >= step + j // P; the deadlines may be in any order."""
  return all(
    deadline >= step + j // groups_per_step
    for j, deadline in enumerate(sorted(deadlines))
  )


def fits(num_due: Mapping[int, int], step: int, groups_per_step: int) -> bool:
  """Do what `is_schedulable` does, given the number of groups per deadline."""
  num_groups = 0
  for deadline in sorted(num_due):
    num_groups += num_due[deadline]
    if num_groups > (deadline - step + 1) * groups_per_step:
      return False
  return True
