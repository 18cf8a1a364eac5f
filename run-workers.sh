#!/usr/bin/env bash
# Starts workers for a coordinator: one on every GPU of this machine, or one on the CPU. Restarts a worker that dies;
# Ctrl-C stops all. As a Slurm job step (srun ./run-workers.sh) it does so on every node.
set -u

usage() {
    cat <<'TEXT'
usage: ./run-workers.sh [HOST] [WORKER OPTIONS]

Starts a worker on every GPU of this machine, or one on the CPU where there is none, for the coordinator on HOST
(default: localhost; in a Slurm job the node that srun was called on). A worker that dies is started again,
after 1 second, then 2, 4, ... up to 60. Ctrl-C stops all.

  ./run-workers.sh 10.0.0.1 --preset best
  ./run-workers.sh 10.0.0.1 --preset laptop --port 12345
  CUDA_VISIBLE_DEVICES=0,2 ./run-workers.sh 10.0.0.1 --preset best --secret-file /home/me/secret
  srun ./run-workers.sh --preset best --secret-file "$PWD/secret"

All with the preset of the coordinator. `python egg.py worker --help` has the options.
TEXT
}

case "${1-}" in
    -h | --help) usage; exit 0 ;;
    "" | -*) host=${SLURM_LAUNCH_NODE_IPADDR:-localhost} ;;
    *) host=$1; shift ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python

# a wrong option or setting ends here, with the worker's own error message
devices=$("$python" egg.py worker "$host" "$@" --list-devices) || exit

# Several tasks of a Slurm step on one node divide its GPUs, unless Slurm has bound each task to one
tasks=${SLURM_STEP_TASKS_PER_NODE:-1}
tasks=${tasks%%[(,]*}
if [ "$tasks" -gt 1 ] && [ "$(wc -w <<<"$devices")" -gt 1 ]; then
    devices=$(tr ' ' '\n' <<<"$devices" | awk -v n="$tasks" -v me="${SLURM_LOCALID:-0}" '(NR - 1) % n == me')
    if [ -z "$devices" ]; then
        echo "run-workers: more tasks than GPUs on this node, nothing to do for task $SLURM_LOCALID" >&2
        exit 0
    fi
fi

# Removes the status line that a killed worker leaves on a terminal.
clear_line() {
    [ -t 1 ] && [ "${TERM-}" != dumb ] && printf '\r\033[K'
}

# Keeps one worker running: restarts it with a growing pause, but not after a wrong use or a refusal (status 2).
keep() {
    trap '' INT     # Ctrl-C reaches the whole process group: `stop` must find every keeper alive to end its worker
    local name=$1 pause=1 child started status
    shift
    trap 'trap "" TERM; [ -n "${child-}" ] && kill -TERM "$child" 2>/dev/null && wait "$child"; exit 0' TERM
    while :; do
        started=$SECONDS
        "$python" egg.py worker "$@" &
        child=$!
        wait "$child" 2>/dev/null     # bash would tell of a signal in its own words
        status=$?
        child=
        if [ "$status" = 0 ] || [ "$status" = 2 ]; then
            return "$status"
        fi
        [ $((SECONDS - started)) -gt 60 ] && pause=1
        clear_line
        echo "run-workers: worker on $name ended with status $status, starting it again in $pause s" >&2
        sleep "$pause" &
        child=$!
        wait "$child"
        child=
        pause=$((pause < 30 ? pause * 2 : 60))
    done
}

keepers=()
stop() {
    trap "" INT TERM
    kill -TERM "${keepers[@]}" 2>/dev/null
    wait
    clear_line
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP

for device in $devices; do
    case $device in
        cuda:*) keep "GPU ${device#cuda:}" "$host" "$@" --gpu "${device#cuda:}" & ;;
        *) keep "the CPU" "$host" "$@" & ;;
    esac
    keepers+=($!)
done

worst=0
for keeper in "${keepers[@]}"; do
    wait "$keeper" || worst=$?
done
exit "$worst"
