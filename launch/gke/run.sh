#!/usr/bin/env bash
# A run on GKE: the shared objects, a manifest, its logs, and its end.
#
#   launch/gke/run.sh COMMAND [OPTION...]
#
# Commands:
#   create   make the namespace and what all pods share, once
#   check    let the cluster check the manifest, and start nothing
#   start    start the run of the manifest, or continue it
#   logs     follow the log of the pods that train
#   status   say what the pods of the run do
#   stop     end the run; the trainer writes a checkpoint first
#   delete   stop it, and delete the volume with everything on it
#
# Options:
#   --manifest=FILE   launch/gke/tpu.yaml or gpu.yaml, or a copy of yours
#   --image=IMAGE     of all pods; launch/gke/Dockerfile makes it
#   --dry_run         print every command, and run none
#
# docs/how-to/gke.md walks through a run.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 1
}

dry_run=false
manifest="" image=""
command="${1:-help}"
shift || true
if [[ "$command" =~ ^(-h|-?-?help)$ ]]; then
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  exit
fi
while (($#)); do
  case "$1" in
    --manifest=*) manifest="${1#*=}" ;;
    --image=*) image="${1#*=}" ;;
    --dry_run) dry_run=true ;;
    *) fail "unknown option $1" ;;
  esac
  shift
done

# Prints a command, and runs it unless this is a dry run.
run() {
  echo "+ $*"
  "$dry_run" || "$@"
}

# Passes the manifest, with the image in it, to kubectl.
apply() {
  [[ "$image" =~ ^[A-Za-z0-9_./:@-]+$ ]] || fail "--image=IMAGE is missing"
  echo "+ sed 's|IMAGE|$image|' $manifest | kubectl apply -f - $*"
  "$dry_run" || sed "s|IMAGE|$image|" "$manifest" | kubectl apply -f - "$@"
}

namespace=jaxrl
case "$command" in
  create | delete) ;;
  check | start | logs | status | stop)
    [[ -r "$manifest" ]] || fail "--manifest=FILE is missing, or not readable"
    # The names of the objects, such as run1-trainer.
    names="$(sed -n 's/^  name: //p' "$manifest")"
    trainer="$(grep -- '-trainer$' <<<"$names")" ||
      fail "$manifest has no JobSet whose name ends in -trainer"
    replicas="$(grep -- '-replicas$' <<<"$names")" ||
      fail "$manifest has no RayCluster whose name ends in -replicas"
    ;;
  *) fail "unknown command $command" ;;
esac

case "$command" in
  create)
    run kubectl create namespace "$namespace"
    run kubectl apply -f "$(dirname "$0")/shared.yaml"
    ;;
  check) apply --dry-run=server ;;
  start) apply ;;
  logs)
    run kubectl "--namespace=$namespace" logs --follow --prefix \
      "--selector=jobset.sigs.k8s.io/jobset-name=$trainer"
    ;;
  status)
    run kubectl "--namespace=$namespace" get pods --output=wide \
      "--selector=jaxrl-async/run=${trainer%-trainer}"
    ;;
  stop)
    run kubectl "--namespace=$namespace" delete \
      "jobset/$trainer" "raycluster/$replicas"
    ;;
  delete) run kubectl delete namespace "$namespace" ;;
esac
