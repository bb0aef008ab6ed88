"""Which replica gets a group: the one with the most room."""

from collections.abc import Callable, Mapping
import heapq


def share_out(rooms: Mapping[int, int], give: Callable[[int], int]) -> None:
  """Give each group to the place with the most room, the first among equals.

  Args:
    rooms: for how many trajectories there is room, by place.
    give: gives a group to a place, and returns the trajectories of the group;
      0 if there is none for this place.
  """
  heap = [(-room, place) for place, room in rooms.items() if room > 0]
  heapq.heapify(heap)
  while heap:
    room, place = heap[0]
    num_given = give(place)
    room += num_given
    if num_given and room < 0:
      heapq.heapreplace(heap, (room, place))
    else:
      heapq.heappop(heap)
