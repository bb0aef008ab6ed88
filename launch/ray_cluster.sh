#!/usr/bin/env bash
# A run on machines of your own, which launch/ray_cluster.yaml names.
#
#   launch/ray_cluster.sh COMMAND [--dry_run] [-- FLAG OF launch/train.py...]
#
# Commands:
#   up      make Ray's token, copy this clone, install, and start Ray everywhere
#   start   start the run on the first machine; --config and --workdir come
#           after the --
#   logs    follow its log; Ctrl-C leaves the run alone
#   stop    write a checkpoint and end the run; Ray stays
#   down    end Ray on all machines
#
# With --dry_run every command is printed, those of the other machines too, and
# none is run. RAY_CLUSTER=FILE names another file than launch/ray_cluster.yaml.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 1
}

file="${RAY_CLUSTER:-$(dirname "$0")/ray_cluster.yaml}"
bin="$(dirname "$0")/../.venv/bin"
dry_run=false
command="${1:-help}"
shift || true
if [[ "$command" =~ ^(-h|-?-?help)$ ]]; then
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  exit
fi
while (($#)); do
  case "$1" in
    --dry_run) dry_run=true ;;
    --) break ;;
    *) fail "unknown option $1; flags of launch/train.py come after --" ;;
  esac
  shift
done
[[ "${1:-}" != -- ]] || shift

quoted() {
  local word words=()
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="${word@Q}"
    words+=("$word")
  done
  echo "${words[*]}"
}

exec {log}>&1

# Prints a command, and runs it unless this is a dry run.
run() {
  echo "+ $(quoted "$@")" >&"$log"
  "$dry_run" || "$@"
}

# Prints the commands that `ray up` runs on each machine.
describe() {
  "$bin/python" - "$file" <<'PYTHON'
import sys

import yaml

with open(sys.argv[1]) as file:
  cluster = yaml.safe_load(file)
provider, user = cluster["provider"], cluster["auth"]["ssh_user"]
hosts = [(provider["head_ip"], "head_start_ray_commands")]
hosts += [(ip, "worker_start_ray_commands") for ip in provider["worker_ips"]]
for host, start in hosts:
  for there, here in cluster["file_mounts"].items():
    print(f"+ rsync {here} {user}@{host}:{there}")
  for command in cluster["setup_commands"] + cluster[start]:
    print(f"+ ssh {user}@{host} {command}")
PYTHON
}

# The session of tmux on the first machine in which the run is.
session=jaxrl
on_head() { run "$bin/ray" exec "$file" "$1"; }

case "$command" in
  up)
    # Whoever has the token can run any program on these machines.
    (umask 077 && run "$bin/ray" get-auth-token --generate >/dev/null)
    if "$dry_run"; then describe; fi
    run "$bin/ray" up --yes "$file"
    ;;
  start)
    [[ "$*" == *--config=* && "$*" == *--workdir=* ]] ||
      fail "--config and --workdir are missing after the --"
    flags="$(quoted "$@" --config.cluster.kind=ray --config.cluster.address=auto)"
    train="cd jaxrl_async && RAY_AUTH_MODE=token .venv/bin/python"
    train="$train launch/train.py $flags 2>&1 | tee -ia ~/$session.log"
    on_head "tmux new-session -d -s $session ${train@Q}"
    ;;
  logs) on_head "tail -n 100 -F ~/$session.log" ;;
  # The run catches the signal and ends after a checkpoint; tee ignores it.
  stop) on_head "tmux send-keys -t $session C-c" ;;
  down) run "$bin/ray" down --yes "$file" ;;
  *) fail "unknown command $command" ;;
esac
