"""The sandbox: what programs may do, and how they are judged."""

import os
import socket
import tempfile
import time

import hostile_programs
import pytest

from jaxrl_async.rewards import sandbox as sandbox_lib

GOOD = "def f(x):\n  return x + 1\n"
WRONG = "def f(x):\n  return 0\n"
QUICK = sandbox_lib.Limits(wall_s=1.5, cpu_s=2.0)


def reason_against(box):
  try:
    return sandbox_lib.reason_against(box)
  except sandbox_lib.SandboxError as error:
    return str(error)


REASONS = {
  box: reason_against(box)
  for kind in (sandbox_lib.Kind.BUBBLEWRAP, sandbox_lib.Kind.UNSHARE)
  for has_user in ((False, True) if os.geteuid() == 0 else (True,))
  for box in [sandbox_lib.Sandbox(kind, has_user)]
}
# All that work here. The first one is tested by default, and the others with
# the slow tests.
KINDS = [box for box, reason in REASONS.items() if not reason]
pytestmark = pytest.mark.sandbox


@pytest.fixture(
  params=[
    *KINDS[:1],
    *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1:]),
  ],
  ids=lambda box: name_of(box),
  scope="module",
)
def box(request):
  return request.param


def name_of(box):
  return f"{box.kind}{'-user' * box.has_user}"


def test_it_holds_wherever_temporary_files_are(box, tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as with TMPDIR
  assert not sandbox_lib.reason_against(box)


@pytest.mark.parametrize("box", REASONS, ids=name_of)
def test_what_can_be_made_here_holds(box):
  """One that the kernel refuses is not at fault. One that leaks is.

  Those that leak are not among `KINDS`, so no other test would see them.
  """
  assert "does not hold" not in REASONS[box]


SLEEP_S = 4_321.0


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
  file = tmp_path_factory.mktemp("outside") / "secret.txt"
  file.write_text("a secret")
  os.environ["JAXRL_TEST_SECRET"] = "a secret"
  with socket.create_server(("127.0.0.1", 0)) as server:
    yield str(file), server.getsockname()[1]
  del os.environ["JAXRL_TEST_SECRET"]


def run(box, mode, program):
  if mode == "tests":
    tests = hostile_programs.TESTS
    return box.run_tests(program, tests=tests, wanted=["f"], limits=QUICK)
  script = hostile_programs.of_cases(program)
  return box.run_cases(script, hostile_programs.CASES, limits=QUICK)


@pytest.mark.parametrize(
  "mode", ["tests", pytest.param("cases", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", hostile_programs.PROGRAMS)
def test_a_hostile_program_does_not_pass(box, secret, name, mode):
  file, port = secret
  program = hostile_programs.filled(
    name, secret=file, port=port, sleep_s=SLEEP_S
  )
  start_s = time.monotonic()
  verdict = run(box, mode, program)
  assert verdict.num_passed == 0 and verdict.failures[0], verdict
  assert time.monotonic() - start_s < QUICK.wall_s + 4.0
  with open(file) as untouched:
    assert untouched.read() == "a secret"


@pytest.mark.parametrize("mode", ["tests", "cases"])
@pytest.mark.parametrize(
  "name",
  [
    "a file in place of its directory",
    "a link in place of its directory",
    "nested directories",
    "directories without permissions",
    "interrupting the parent",
    "every signal to the parent",
    "no limits left to the parent",
    "a child that holds its output",
  ],
)
def test_a_judge_outside_of_any_sandbox_survives_its_programs(
  name, mode, tmp_path, monkeypatch
):
  """Only with programs that are harmless there."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  monkeypatch.setattr(sandbox_lib, "_REMOVE_S", 30.0)
  box = sandbox_lib.Sandbox(sandbox_lib.Kind.UNSAFE, has_user=False)
  program = hostile_programs.filled(name, secret="", port=0, sleep_s=SLEEP_S)
  verdict = run(box, mode, program)
  assert verdict.num_passed == 0 and verdict.failures[0], verdict
  assert run(box, mode, GOOD).num_passed >= 1
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", hostile_programs.COUNTERS)
def test_no_count_lives_on_from_one_case_to_the_next(box, name):
  cases = [{"stdin": "", "stdout": "1"}] * 3
  verdict = box.run_cases(hostile_programs.COUNTERS[name], cases)
  assert verdict.failures == ["", "", ""]


def test_an_open_network_would_be_found(monkeypatch, secret):
  """The probe and the hostile program reach it where nothing closes it."""

  def leaky(limits, *, has_user):
    command = bubblewrap(limits, has_user=has_user)
    if has_user:
      return [*command[:-1], "--share-net", command[-1]]
    return [word for word in command if word != "--unshare-net"]

  bubblewrap = sandbox_lib._bubblewrap
  monkeypatch.setattr(sandbox_lib, "_bubblewrap", leaky)
  box = next(b for b in KINDS if b.kind is sandbox_lib.Kind.BUBBLEWRAP)
  reason = sandbox_lib.reason_against(box)
  assert reason == "it does not hold: assertion failed connects"
  program = hostile_programs.filled(
    "the network of this machine",
    secret=secret[0],
    port=secret[1],
    sleep_s=SLEEP_S,
  )
  verdict = box.run_tests(program, tests=hostile_programs.TESTS, limits=QUICK)
  assert verdict.failures == [""]


def test_nothing_of_a_program_outlives_it(box, secret):
  program = hostile_programs.filled(
    "a daemon", secret=secret[0], port=secret[1], sleep_s=SLEEP_S
  )
  before = number_of_processes()
  box.run_tests(program, tests=hostile_programs.TESTS, limits=QUICK)
  deadline = time.monotonic() + 10.0
  while number_of_processes() > before and time.monotonic() < deadline:
    time.sleep(0.05)
  assert number_of_processes() <= before


def test_a_judge_that_is_stuck_ends_with_its_sandbox(box):
  before = number_of_processes()
  endless = "import itertools\n-1 in itertools.count()"  # heeds no signal
  verdict = box.run_tests(GOOD, tests=endless, limits=QUICK)
  assert verdict.failures == ["timeout"]
  deadline = time.monotonic() + 10.0
  while number_of_processes() > before and time.monotonic() < deadline:
    time.sleep(0.05)
  assert number_of_processes() <= before


def number_of_processes():
  """Of processes that hold the text of one which only sandboxes have."""
  count = 0
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{pid}/cmdline", "rb") as file:
        text = file.read()
    except OSError:
      continue  # it has ended
    count += b"holds a program which a model wrote" in text
    count += b"The first process in a sandbox" in text
  return count


@pytest.mark.parametrize(
  ("command", "reason"),
  [
    (["sh", "-c", "echo no namespaces >&2; exit 7"], "code 7.*no namespaces"),
    (["sh", "-c", "sleep 60"], "did not start within 0.2 s"),
  ],
)
def test_a_sandbox_that_cannot_be_made_is_no_fault_of_a_program(
  command, reason, monkeypatch
):
  monkeypatch.setattr(sandbox_lib, "_START_S", 0.2)
  monkeypatch.setattr(sandbox_lib, "_unshare", lambda *_, **__: command)
  box = sandbox_lib.Sandbox(sandbox_lib.Kind.UNSHARE, has_user=True)
  for mode in ("tests", "cases"):
    with pytest.raises(sandbox_lib.SandboxError, match=reason):
      run(box, mode, GOOD)


def test_a_right_program_passes_and_a_wrong_one_fails(box):
  assert box.run_tests(GOOD, tests=hostile_programs.TESTS).failures == [""]
  (failure,) = box.run_tests(WRONG, tests=hostile_programs.TESTS).failures
  assert failure == "assertion failed"


@pytest.mark.parametrize(
  "value",
  [
    "None",
    "True",
    "-(10**40)",
    "2**64 - 1",
    "10**20_000",
    "2.5",
    "float('inf')",
    "1 + 2j",
    "'a\\n\\u20ac'",
    "b'\\x00\\xff'",
    "[1, (2, 3), {'a': [4]}, {5, 6}, frozenset({7})]",
    "{1: 'a', (2, 3): None}",
  ],
)
def test_plain_data_goes_in_and_comes_out_as_it_is(value):
  box = sandbox_lib.find()
  tests = f"x = {value}\ny = f(x)\nassert y == x and type(y) is type(x), y"
  assert box.run_tests("def f(x):\n  return x", tests=tests).failures == [""]


def test_tests_may_wait_for_an_exception_and_call_several_functions():
  program = "def f(x):\n  raise ValueError('no')\ndef g(x, *, y): return x - y"
  tests = """
try:
  f(1)
except ValueError as error:
  assert str(error) == "no"
else:
  raise AssertionError
assert g(3, y=1) == 2
"""
  assert sandbox_lib.find().run_tests(program, tests=tests).failures == [""]


@pytest.mark.parametrize(
  ("raised", "expected"),
  [
    ("json.JSONDecodeError('no', '', 0)", "ValueError"),
    ("UnicodeDecodeError('ascii', b'', 0, 1, 'no')", "UnicodeError"),
    ("Wrong('no')", "LookupError"),
    ("FileNotFoundError('no')", "OSError"),
  ],
)
def test_an_exception_is_caught_as_what_it_is_derived_from(raised, expected):
  program = f"""
import json
class Wrong(KeyError): pass
def f(x): raise {raised}
"""
  tests = f"""
try:
  f(1)
except {expected}:
  pass
"""
  assert sandbox_lib.find().run_tests(program, tests=tests).failures == [""]


@pytest.mark.parametrize(
  "tests",
  [
    "assert all(map(f, [1, 2]))",
    "for x, y in zip(map(f, [1, 2]), [2, 3]): assert x == y",
    "assert sum(map(f, [])) == sum(map(f, [1]))",
  ],
)
def test_a_program_cannot_end_a_loop_over_its_calls(tests):
  program = "def f(x):\n  raise StopIteration"
  (failure,) = sandbox_lib.find().run_tests(program, tests=tests).failures
  assert failure == "Failed: StopIteration: "


def test_an_answer_may_not_exhaust_the_memory_of_the_tests():
  (failure,) = (
    sandbox_lib.find()
    .run_tests("def f(x):\n  return 10**9", tests="bytearray(f(1))")
    .failures
  )
  assert failure.startswith("MemoryError")


@pytest.mark.parametrize("text", ["-" * 200_000 + "1", "(" * 200_000, "x" * 10])
def test_a_program_is_parsed_where_it_does_no_harm(text):
  program = f"def f(x): return {text}"
  (failure,) = sandbox_lib.find().run_tests(program, tests="f(1)").failures
  assert failure


def test_integers_may_have_many_digits():
  box = sandbox_lib.find()
  tests = "assert str(f(5_000)) == '1' + '0' * 5_000 and f(9) == 10**9"
  program = "def f(x):\n  return 10**x"
  assert box.run_tests(program, tests=tests).failures == [""]
  script = "print(10 * int(input()))"
  cases = [{"stdin": "1" * 5_000, "stdout": "1" * 5_000 + "0"}]
  assert box.run_cases(script, cases).failures == [""]


def test_the_interpreter_has_its_standard_library():
  program = """
import collections, decimal, functools, hashlib, heapq, itertools, math, re
def f(x):
  return hashlib.md5(str(x).encode()).hexdigest()
"""
  tests = "assert f(1) == 'c4ca4238a0b923820dcc509a6f75849b'"
  assert sandbox_lib.find().run_tests(program, tests=tests).failures == [""]


def test_cases_compare_what_a_program_writes(box):
  program = "n = int(input())\nprint(n + 1, ' ')\nprint()"
  cases = [
    {"stdin": "1\n", "stdout": "2"},
    {"stdin": "2\n", "stdout": "3  \n\n"},
    {"stdin": "3\n", "stdout": "5\n"},
    {"stdin": "x\n", "stdout": ""},
  ]
  verdict = box.run_cases(program, cases)
  assert verdict.num_passed == 2
  assert verdict.failures[2] == "wrote '4  \\n\\n'"
  assert verdict.failures[3] == "exit code 1"


def test_a_case_sees_nothing_of_the_one_before(box):
  program = """
import os, time
print(os.path.exists('left'))
open('left', 'w').close()
if os.fork() == 0:
  os.close(1)
  time.sleep(1000)
"""
  cases = [{"stdin": "", "stdout": "False"}] * 2
  assert box.run_cases(program, cases, limits=QUICK).failures == ["", ""]
