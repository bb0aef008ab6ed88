"""What another user of the machine can do while a whole run is on: nothing."""

import contextlib
import pathlib
import signal
import subprocess
import sys

import cluster_world
import other_user
import pytest
import waiting

pytestmark = [
  pytest.mark.slow,
  pytest.mark.timeout(900),
  pytest.mark.namespaces,
  pytest.mark.other_user,
]

LOOPBACK = {
  "0100007F",
  "0000000000000000FFFF00000100007F",
  "00000000000000000000000001000000",
}
LAUNCH = cluster_world.ROOT / "launch"
# How it is started, and its flags.
KINDS = {
  "local": ([LAUNCH / "train.py"], []),
  "ray": (
    [
      LAUNCH / "trainer_world.py",
      *("--num_processes=2", "--max_restarts=0", "--"),
    ],
    [
      "--config.cluster.kind=ray",
      "--config.cluster.trainer_processes=2",
      "--config.mesh.train_data=-1",
      "--config.cluster.replica_processes=2",
      "--config.mesh.rollout_tensor=2",
    ],
  ),
}
# Says something at each port, and stays without another word.
STRANGER = r"""
for port; do
  exec {connection}<>"/dev/tcp/127.0.0.1/$port" || continue
  printf 'GET / HTTP/1.1\r\n\r\n%99s' x >&$connection
done
echo ready
read -r _
"""


@contextlib.contextmanager
def running(machine, kind):
  """A run that has begun; yields what waits for further steps."""
  script, flags = KINDS[kind]
  environment = cluster_world.ENVIRONMENT | {"HOME": other_user.HOME}
  environment.pop("TMPDIR", None)
  metrics = machine.home / "run" / "metrics.jsonl"
  with open(machine.home / "said", "w") as said:
    run = subprocess.Popen(
      [
        *(*machine.inside, sys.executable, *script),
        f"--config={cluster_world.ROOT / 'configs' / 'tiny.py'}",
        f"--workdir={other_user.HOME}/run",
        f"--compile_cache={cluster_world.COMPILE_CACHE}",
        f"--config.train.num_steps={cluster_world.FOR_EVER}",
        "--config.eval.every=0",
        "--config.transfer.channel=orbax",
        *flags,
      ],
      env=environment,
      stdout=said,
      stderr=said,
    )

  def go_on(num_steps):
    wanted = len(cluster_world.lines(metrics)) + num_steps
    cluster_world.until(
      lambda: len(cluster_world.lines(metrics)) >= wanted,
      run,
      (machine.home / "said").read_text()[-4000:],
      400,
    )

  try:
    go_on(2)
    yield go_on
    run.send_signal(signal.SIGTERM)
    assert run.wait(200) == 130, (machine.home / "said").read_text()[-4000:]
  finally:
    run.kill()
    run.wait()


@contextlib.contextmanager
def stranger(machine, ports):
  with subprocess.Popen(
    [*machine.inside, *other_user.AS_NOBODY, STRANGER, "bash"]
    + [*map(str, ports)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == "ready\n"
    yield
    process.stdin.close()


def variables(process):
  """The environment of a process, as its user sees it."""
  lines = (process / "environ").read_bytes().split(b"\0")
  return dict(line.split(b"=", 1) for line in lines if b"=" in line)


@pytest.mark.parametrize(
  "kind", ["local", pytest.param("ray", marks=pytest.mark.nightly)]
)
def test_another_user_can_do_nothing_to_a_run(kind):
  cluster_world.COMPILE_CACHE.mkdir(exist_ok=True)
  kept = [cluster_world.ROOT, cluster_world.COMPILE_CACHE]
  with other_user.machine(*kept) as machine:
    before, open_before = machine.made(), machine.open_to_others()
    with running(machine, kind) as go_on:
      made = machine.made() - before
      assert machine.open_to_others() <= open_before
      in_shared = {str(directory): [] for directory in other_user.SHARED}
      for path in map(pathlib.Path, made):
        if str(path.parent) in in_shared:
          found = other_user.can(path, machine.inside)
          if path.name.startswith("sem.mp-"):  # a file, which has a name
            assert found == ["list"]
            continue
          assert not found, (path, found)
          in_shared[str(path.parent)].append(path.name.split("-")[0])
      # There was something to try it with.
      assert {*in_shared["/tmp"]} == {"pymp"} | {"ray"} & {kind}
      assert in_shared["/dev/shm"] == ["jaxrl_async"]

      places = machine.listening()
      assert {address for address, _ in places} <= LOOPBACK
      assert not machine.abstract_sockets()
      processes = [*machine.processes()]
      tokens = {variables(x).get(b"RAY_AUTH_TOKEN") for x in processes} - {None}
      assert len(tokens) == (kind == "ray")
      for process in processes:
        line = (process / "cmdline").read_bytes()
        assert not any(token in line for token in tokens), line
        assert not other_user.does('cat "$1/environ"', process)
      with stranger(machine, [port for _, port in places]):
        go_on(3)

    def has_left():
      return {
        path
        for path in machine.made() - before
        # It stays where an interpreter is ended without being shut down.
        if not path.startswith("/tmp/pymp-")
      }

    waiting.until(lambda: not has_left())
