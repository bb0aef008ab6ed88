"""Who finds room in the queue, and when the others had better come again."""

import pytest

from jaxrl_async.serving import request_places


def places(max_requests=16, max_further_choices=20):
  return request_places.Places(max_requests, max_further_choices)


def end_choices(these, num, *, first_s=100.0, every_s=0.5):
  for i in range(num):
    these.end_choice(first_s + every_s * (i + 1))
  return first_s + every_s * num


def test_many_choices_leave_room_for_a_single_one():
  these = places()
  these.take("a", 21)
  assert "no room for 2 more" in these.refusal("b", 2)
  for _ in range(13):
    assert these.refusal("a", 1) is None
    these.take("a", 1)


def test_choices_that_have_ended_make_room():
  these = places()
  these.take("a", 21)
  these.end_choice(1.0)
  assert these.refusal("b", 2) is None
  assert these.refusal("b", 3) is not None
  these.leave("a", 20)
  assert these.refusal("b", 21) is None


def test_the_last_places_are_for_clients_that_hold_none():
  these = places()
  for _ in range(14):
    assert these.refusal("a", 1) is None
    these.take("a", 1)
  assert "14 requests" in these.refusal("a", 1)
  for client in ("b", "c"):
    assert these.refusal(client, 1) is None
    these.take(client, 1)
  assert "16 requests" in these.refusal("d", 1)
  these.leave("a", 1)
  assert these.refusal("d", 1) is None


def test_who_is_refused_is_told_the_time_that_the_last_choices_took():
  these = places()
  these.take("a", 40)
  now_s = end_choices(these, 20)  # one in half a second; as many are left
  # Of 19 further ones, 20 may wait: 5 more need four to end, at half a second.
  assert these.retry_after_s(6, now_s) == pytest.approx(4 * 0.5)


def test_refused_requests_are_told_to_come_one_after_the_other():
  these = places()
  these.take("a", 60)
  now_s = end_choices(these, 20)
  told = [these.retry_after_s(4, now_s) for _ in range(3)]
  # Each needs 22 of the forty to end, which takes half a second each; at the
  # latest they come when everything that is here has been written.
  assert told == pytest.approx([11.0, 20.0, 20.0])


def test_nobody_is_told_to_come_again_in_less_than_a_second():
  these = places(max_requests=1)
  these.take("a", 1)
  assert these.retry_after_s(1, 0.0) >= 1.0
