#!/usr/bin/env bash
# A run on Cloud TPU slices: creates them, installs, starts, resumes, deletes.
#
#   launch/tpu_pod.sh COMMAND --name=NAME --project=PROJECT --zone=ZONE \
#     --accelerator_type=v5p-8 [OPTION...] [-- FLAG OF launch/train.py...]
#
# Commands:
#   create   request the slices, and wait until all of them are there
#   install  mount the shared directory; copy this commit and Ray's token;
#            install the packages
#   start    start the run; needs --config and --workdir after the --
#   logs     follow the log of the process that drives the run
#   status   say what the slices and the processes on them do
#   stop     write a checkpoint and end the run; the slices stay
#   resume   after a preemption: request lost slices again, install, start
#   delete   end everything and give all slices back
#
# Options:
#   --slices=N                  slice 0 trains, the others generate [1]
#   --rollout_accelerator_type  of slices 1 and higher [as slice 0]
#   --runtime_version           of the machines [the one for the chip]
#   --spot                      cheaper slices, which may be preempted
#   --network, --subnetwork     of the machines [the default network]
#   --nfs=SERVER:/SHARE         shared directory; needed unless one host is all
#   --mount=DIRECTORY           where the hosts mount it [/mnt/jaxrl]
#   --token=FILE                Ray's token [~/.ray/auth_token]
#   --dry_run                   print every command, and run none
#
# Which hosts do what:
#   1 slice of 1 host      trains and generates on that host, in one process
#   1 slice of H hosts     host 0 trains, every other host is a replica
#   N slices               slice 0 trains, every other slice is a replica
#
# Each slice is a queued resource of its own, NAME-0, NAME-1 and so on. Slices
# of one request (--node-count) would be joined into a single program by JAX,
# and would all be lost with one of them.
#
# Ray and the run are systemd units on the hosts, jaxrl-ray and jaxrl-train.
# docs/how-to/tpu.md walks through a run.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 1
}

((BASH_VERSINFO[0] >= 5)) || fail "bash 5 or newer is needed"

# The words of a command as one string, quoted for a shell where they must be.
quoted() {
  local word words=()
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="${word@Q}"
    words+=("$word")
  done
  echo "${words[*]}"
}

# Prints a command, and runs it unless this is a dry run.
run() {
  echo "+ $(quoted "$@")" >&"$log"
  "$dry_run" || "$@"
}

exec {log}>&1
dry_run=false
spot=false
name="" project="" zone="" nfs=""
type="" rollout_type="" version=""
network=()
slices=1
mount=/mnt/jaxrl
token="$HOME/.ray/auth_token"
command="${1:-help}"
shift || true
if [[ "$command" =~ ^(-h|-?-?help)$ ]]; then
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  exit
fi
while (($#)); do
  case "$1" in
    --name=*) name="${1#*=}" ;;
    --project=*) project="${1#*=}" ;;
    --zone=*) zone="${1#*=}" ;;
    --accelerator_type=*) type="${1#*=}" ;;
    --rollout_accelerator_type=*) rollout_type="${1#*=}" ;;
    --runtime_version=*) version="${1#*=}" ;;
    --slices=*) slices="${1#*=}" ;;
    --nfs=*) nfs="${1#*=}" ;;
    --mount=*) mount="${1#*=}" ;;
    --token=*) token="${1#*=}" ;;
    --network=* | --subnetwork=*) network+=("$1") ;;
    --spot) spot=true ;;
    --dry_run) dry_run=true ;;
    --) break ;;
    *) fail "unknown option $1; flags of launch/train.py come after --" ;;
  esac
  shift
done
[[ "${1:-}" != -- ]] || shift
train_flags=("$@")

for option in name project zone; do
  [[ -n "${!option}" ]] || fail "--$option is missing"
done
[[ -n "$type" ]] || fail "--accelerator_type is missing, such as v5p-8"
[[ "$slices" =~ ^[1-9][0-9]?$ ]] || fail "--slices=$slices is no number"
[[ "$nfs$mount" =~ ^[A-Za-z0-9_./:-]+$ ]] ||
  fail "--nfs=SERVER:/SHARE and --mount=DIRECTORY have plain names only"
rollout_type="${rollout_type:-$type}"

# -- what a type of slice is ---------------------------------------------------

# The shape of a slice as launch/train.py names it, such as v5p:2x2x1. Google
# counts two cores for each chip of a v5p, and one for the others.
shape_of() {
  local chips="" unknown="$1 is no known type; v5litepod-16, v6e-16 and v5p-32 are"
  case "$1" in
    v5litepod-*) chips="${1#v5litepod-}" && echo -n v5e: ;;
    v6e-*) chips="${1#v6e-}" && echo -n v6e: ;;
    v5p-*[02468]) chips="$((${1#v5p-} / 2))" && echo -n v5p: ;;
  esac
  case "$1:$chips" in
    v5p-*:4) echo 2x2x1 ;;
    v5p-*:8) echo 2x2x2 ;;
    v5p-*:16) echo 2x2x4 ;;
    v5p-*:32) echo 2x4x4 ;;
    v5p-*:64) echo 4x4x4 ;;
    v5p-*:128) echo 4x4x8 ;;
    v5p-*:256) echo 4x8x8 ;;
    v5p-*:512) echo 8x8x8 ;;
    v5p-*) fail "$unknown" ;;
    *:4) echo 2x2 ;;
    *:8) echo 2x4 ;;
    *:16) echo 4x4 ;;
    *:32) echo 4x8 ;;
    *:64) echo 8x8 ;;
    *:128) echo 8x16 ;;
    *:256) echo 16x16 ;;
    *) fail "$unknown" ;;
  esac
}

# Hosts of a slice. They have four chips each, but v5e:2x4 and v6e:2x4 are one.
hosts_of() {
  local chips="${1##*-}"
  [[ "$1" == v5p-* ]] && chips="$((chips / 2))"
  if ((chips <= 8)) && [[ "$1" != v5p-* ]]; then
    echo 1
  else
    echo "$((chips / 4))"
  fi
}

runtime_of() {
  case "$1" in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
  esac
}

# Makes one host of a larger slice look like a slice of its own, to libtpu and
# to Ray.
environment_of_single_host() {
  echo TPU_SKIP_MDS_QUERY=1
  echo TPU_WORKER_ID=0
  echo TPU_WORKER_HOSTNAMES=localhost
  echo TPU_HOST_BOUNDS=1,1,1
  echo TPU_CHIPS_PER_HOST_BOUNDS=2,2,1
  case "$1" in
    v5p-*) echo TPU_ACCELERATOR_TYPE=v5p-8 && echo TPU_TOPOLOGY=2x2x1 ;;
    *) echo "TPU_ACCELERATOR_TYPE=${1%-*}-4" && echo TPU_TOPOLOGY=2x2 ;;
  esac
}

type_of_slice() {
  if (($1 == 0)); then echo "$type"; else echo "$rollout_type"; fi
}

shape="$(shape_of "$type")"
rollout_shape="$(shape_of "$rollout_type")"
hosts="$(hosts_of "$type")"
has_ray=false
if ((slices > 1 || hosts > 1)); then has_ray=true; fi
single_hosts=false
if ((slices == 1 && hosts > 1)); then single_hosts=true; fi

# -- the hosts -----------------------------------------------------------------

where=("--project=$project" "--zone=$zone")

# Runs a command on hosts of a slice: SLICE HOSTS COMMAND. HOSTS is "all", a
# number, or a range such as 1-3.
on_hosts() {
  run gcloud compute tpus tpu-vm ssh "$name-$1" "${where[@]}" \
    "--worker=$2" "--command=$3"
}

# Copies a file to all hosts of a slice: SLICE FILE TARGET.
copy_to() {
  run gcloud compute tpus tpu-vm scp "$2" "$name-$1:$3" "${where[@]}" \
    --worker=all
}

# Prints the shell command that starts a systemd unit: UNIT, COMMAND and its
# arguments.
unit() {
  local variable words=(
    sudo systemd-run "--unit=$1" --collect
    # The signal goes to the run alone, which then writes a checkpoint.
    --property=KillMode=mixed --property=TimeoutStopSec=600
    # A run that fails goes on from its checkpoint, five times an hour.
    --property=Restart=on-failure --property=RestartSec=15
    --property=StartLimitIntervalSec=3600 --property=StartLimitBurst=5
    --property=LimitMEMLOCK=infinity --property=LimitNOFILE=1048576
    --setenv=RAY_AUTH_MODE=token
  )
  for variable in RAY_USE_TLS RAY_TLS_{SERVER_CERT,SERVER_KEY,CA_CERT}; do
    if [[ -n "${!variable:-}" ]]; then
      words+=("--setenv=$variable=${!variable}")
    fi
  done
  # The host's own shell fills in these.
  local on_host="--uid=\$(id -u) --working-directory=\$PWD"
  if "$single_hosts"; then
    while read -r variable; do
      words+=("--setenv=$variable")
    done < <(environment_of_single_host "$type")
    on_host+=" --setenv=TPU_NAME=\$(hostname)"
  fi
  shift
  echo "cd jaxrl_async && $(quoted "${words[@]}") $on_host $(quoted "$@")"
}

# -- the commands --------------------------------------------------------------

# Sets `state` to that of a slice. A dry run assumes the state in $2.
get_state() {
  state="$(run gcloud compute tpus queued-resources describe "$name-$1" \
    "${where[@]}" "--format=value(state.state)" || echo MISSING)"
  if "$dry_run"; then state="$2"; fi
}

create_slice() {
  local of
  of="$(type_of_slice "$1")"
  local words=(
    gcloud compute tpus queued-resources create "$name-$1"
    "--node-id=$name-$1" "${where[@]}" "--accelerator-type=$of"
    "--runtime-version=${version:-$(runtime_of "$of")}" "${network[@]}"
  )
  if "$spot"; then words+=(--spot); fi
  run "${words[@]}"
}

wait_for_slice() {
  local state
  while get_state "$1" ACTIVE && [[ "$state" != ACTIVE ]]; do
    case "$state" in
      FAILED | SUSPENDING | SUSPENDED | MISSING)
        fail "slice $name-$1 is $state; 'resume' requests it again" ;;
    esac
    echo "slice $name-$1 is $state"
    sleep 30
  done
}

delete_slice() {
  run gcloud compute tpus queued-resources delete "$name-$1" "${where[@]}" \
    --force --quiet
}

create() {
  local slice
  for ((slice = 0; slice < slices; slice++)); do
    create_slice "$slice"
  done
  for ((slice = 0; slice < slices; slice++)); do
    wait_for_slice "$slice"
  done
}

install() {
  local slice source=/tmp/jaxrl_async.tar.gz
  if "$has_ray" && [[ -z "$nfs" ]]; then
    fail "several hosts need a shared directory: --nfs=SERVER:/SHARE"
  fi
  run git -C "$(dirname "$0")/.." archive --format=tar.gz "--output=$source" HEAD
  if "$has_ray" && [[ ! -e "$token" ]]; then
    run mkdir -p "$(dirname "$token")"
    run install -m 600 /dev/null "$token"
    run openssl rand -hex -out "$token" 32
  fi
  for ((slice = 0; slice < slices; slice++)); do
    if [[ -n "$nfs" ]]; then
      # With actimeo=1 hosts see a new version of the weights within a second.
      on_hosts "$slice" all "sudo apt-get -q install -y nfs-common \
&& sudo mkdir -p $mount && { mountpoint -q $mount \
|| sudo mount -t nfs -o rw,hard,actimeo=1 $nfs $mount; } \
&& sudo chmod a+rwx $mount"
    fi
    copy_to "$slice" "$source" jaxrl_async.tar.gz
    on_hosts "$slice" all "mkdir -p jaxrl_async \
&& tar -xzf jaxrl_async.tar.gz -C jaxrl_async && cd jaxrl_async \
&& python3 -m pip install -q --user uv \
&& python3 -m uv sync -q --python=3.11 --no-dev --extra=tpu --extra=ray"
    if "$has_ray"; then
      on_hosts "$slice" all "mkdir -p -m 700 .ray && rm -f .ray/auth_token"
      copy_to "$slice" "$token" .ray/auth_token
      on_hosts "$slice" all "chmod 600 .ray/auth_token"
    fi
  done
}

check_train_flags() {
  [[ " ${train_flags[*]} " == *" --config="* ]] ||
    fail "start: --config=FILE is missing after the --"
  [[ " ${train_flags[*]} " == *" --workdir="* ]] ||
    fail "start: --workdir=DIRECTORY is missing after the --"
}

start_ray() {
  local slice head
  head="$(run gcloud compute tpus tpu-vm describe "$name-0" "${where[@]}" \
    "--format=value(networkEndpoints[0].ipAddress)")"
  if "$dry_run"; then head=HEAD_IP; fi
  # The head is on the host that drives the run. Ray gives none of its chips
  # away, since they train.
  on_hosts 0 0 "$(unit jaxrl-ray .venv/bin/ray start --head --block \
    "--node-ip-address=$head" --port=6379 --num-gpus=0 '--resources={"TPU": 0}' \
    --include-dashboard=false --disable-usage-stats)"
  local join=(
    .venv/bin/ray start "--address=$head:6379" --block --disable-usage-stats
  )
  if "$single_hosts"; then
    on_hosts 0 "1-$((hosts - 1))" "$(unit jaxrl-ray "${join[@]}")"
  fi
  for ((slice = 1; slice < slices; slice++)); do
    on_hosts "$slice" all "$(unit jaxrl-ray "${join[@]}")"
  done
}

start() {
  check_train_flags
  local flags=("${train_flags[@]}") workers=all
  if "$single_hosts"; then
    workers=0
    flags+=(
      --config.cluster.kind=ray --config.cluster.address=auto
      "--config.cluster.replicas=$((hosts - 1))"
    )
    case "$shape" in
      v5p:*) flags+=(--config.cluster.replica_tpu=v5p:2x2x1) ;;
      *) flags+=("--config.cluster.replica_tpu=${shape%:*}:2x2") ;;
    esac
  elif "$has_ray"; then
    # On a slice JAX finds out by itself which process it is.
    flags+=(
      --config.cluster.kind=ray --config.cluster.address=auto
      "--config.cluster.replicas=$((slices - 1))"
      "--config.cluster.replica_tpu=$rollout_shape"
      "--config.cluster.trainer_processes=$hosts"
    )
  fi
  if "$has_ray"; then
    flags+=("--config.transfer.directory=$mount/weights")
    start_ray
  fi
  on_hosts 0 "$workers" "$(unit jaxrl-train .venv/bin/python launch/train.py \
    "${flags[@]}")"
}

logs() {
  on_hosts 0 0 "journalctl --unit=jaxrl-train --lines=200 --follow"
}

status() {
  local slice state
  for ((slice = 0; slice < slices; slice++)); do
    get_state "$slice" ACTIVE
    echo "slice $name-$slice ($(type_of_slice "$slice")): $state"
    if [[ "$state" == ACTIVE ]]; then
      on_hosts "$slice" all \
        "hostname; systemctl is-active jaxrl-ray jaxrl-train || true"
    fi
  done
}

stop() {
  local slice state units
  for ((slice = 0; slice < slices; slice++)); do
    get_state "$slice" ACTIVE
    [[ "$state" == ACTIVE ]] || continue
    # The run first: while it writes its checkpoint, it still uses Ray.
    for units in jaxrl-train jaxrl-ray; do
      on_hosts "$slice" all "sudo systemctl stop $units 2>/dev/null || true"
    done
  done
}

resume() {
  check_train_flags
  local slice state
  for ((slice = 0; slice < slices; slice++)); do
    get_state "$slice" SUSPENDED
    case "$state" in
      ACTIVE | WAITING_FOR_RESOURCES | PROVISIONING | CREATING | ACCEPTED) ;;
      MISSING) create_slice "$slice" ;;
      *) delete_slice "$slice" && create_slice "$slice" ;;
    esac
  done
  for ((slice = 0; slice < slices; slice++)); do
    wait_for_slice "$slice"
  done
  stop
  install
  start
}

delete() {
  local slice
  for ((slice = 0; slice < slices; slice++)); do
    delete_slice "$slice"
  done
}

case "$command" in
  create | install | start | logs | status | stop | resume | delete) "$command" ;;
  *) fail "unknown command ${command@Q}; use create, install, start, logs," \
    "status, stop, resume or delete" ;;
esac
