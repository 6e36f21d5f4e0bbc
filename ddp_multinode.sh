#!/usr/bin/env bash
#SBATCH --job-name=ddp
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=TERM@90
#SBATCH --open-mode=append
#
# Two machines and more: torchrun on each of them, wired up and checked before it starts.
#
# When:  training on several machines, by hand or under SLURM. The same files, data and torch are on all of them.
# Not:   on one machine, where `torchrun --nproc_per_node=4 ddp_torchrun.py` is enough.
#
#   ./ddp_multinode.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- ddp_torchrun.py --epochs 5   # on 10.0.0.1
#   ./ddp_multinode.sh --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -- ddp_torchrun.py --epochs 5   # on the other
#   ./ddp_multinode.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --check        # on each: does it work?
#   ./ddp_multinode.sh --elastic 1:2 --master-addr 10.0.0.1 -- ddp_torchrun.py --snapshot run.pt      # on each
#   ./ddp_multinode.sh --simulate 2 -- ddp_torchrun.py --epochs 5                     # two "machines" on this one
#   sbatch --nodes=2 ddp_multinode.sh -- ddp_torchrun.py --snapshot run.pt
#
# The classical commands for two machines, with node_rank 1 on the second; they neither check nor wait:
#   torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 --nproc_per_node=4 ddp_torchrun.py
#   python -m torch.distributed.launch --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 \
#       --nproc_per_node=4 ddp_torchrun.py
#
#   --nnodes N --node-rank R   how many machines; which of them this one is, from 0
#   --master-addr HOST         name or address of the machine with node rank 0, by which all others reach it
#   --master-port P            a port of its, free there; default 29500
#   --nproc-per-node N         processes on this machine; default: its accelerators, or 1
#   --elastic MIN:MAX          go on with fewer machines when some fail, and with more when they come (back)
#   --max-restarts N           how often the processes may fail, with --elastic; default 10
#   --timeout SECONDS          how long to wait for the other machines; default 600
#   --simulate N               N machines on this one, on the CPU; the other options hold for each
#   --check                    do not train: join, show all ranks, test and measure the connections
#   --dry-run                  print torchrun's command and end
#   -- SCRIPT ARGUMENTS        default: ddp_torchrun.py, as it lies beside this file
set -euo pipefail

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

# Run a command to its end. SIGTERM and Ctrl-C are passed on as SIGTERM; a second one, later, kills.
supervise() {
    local status=0 signal=0 since child
    set -m # so that Ctrl-C reaches it once, through the trap
    trap 'pass_on 143' TERM
    trap 'pass_on 130' INT
    pass_on() {
        if [ "$signal" = 0 ]; then signal=$1 since=$SECONDS; kill -TERM "$child" 2>/dev/null || :
        elif [ $((SECONDS - since)) -gt 1 ]; then kill -KILL -- "-$child" 2>/dev/null || :; fi
    }
    "$@" </dev/null &
    child=$!
    while status=0; wait "$child" 2>/dev/null || status=$?; kill -0 "$child" 2>/dev/null; do :; done
    [ "$status" = 0 ] || [ "$signal" = 0 ] || status=$signal # torchrun says 1, whatever it was
    return "$status"
}

# --------------------------------------------------------------------------------------------------- options
given=("$@")
nnodes='' node_rank='' master_addr='' master_port='' nproc_per_node='' elastic='' max_restarts=10 timeout=600 simulate=''
check='' dry_run=''
while [ $# -gt 0 ]; do
    case $1 in
    --) shift; break ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --check) check=yes; shift ;;
    --dry-run) dry_run=yes; shift ;;
    --help | -h) sed -n '/^# Two/,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    --nnodes | --node-rank | --master-addr | --master-port | --nproc-per-node | --elastic | --max-restarts | --timeout | --simulate)
        [ $# -gt 1 ] || fail "$1 needs a value"
        name=${1#--}
        printf -v "${name//-/_}" %s "$2"
        shift 2 ;;
    *) fail "unknown option $1; what belongs to the script comes after --, see --help" ;;
    esac
done
for option in nnodes:1 node_rank:0 master_port:1 nproc_per_node:1 max_restarts:0 timeout:1 simulate:1; do
    name=${option%:*}
    case ${!name} in
    '') ;;
    *[!0-9]* | ??????????*) fail "--${name//_/-} ${!name} is not a whole number" ;;
    *) [ "${!name}" -ge "${option#*:}" ] || fail "--${name//_/-} ${!name} must be at least ${option#*:}" ;;
    esac
done
[ "${master_port:-1}" -lt 65536 ] || fail "--master-port $master_port is above 65535"
case $elastic in
'') ;;
*[!0-9:]* | *:*:* | :* | *: | [!:]) fail "--elastic $elastic is not MIN:MAX, such as 1:2" ;;
*:*) ((1 <= ${elastic%:*} && ${elastic%:*} <= ${elastic#*:})) || fail "--elastic $elastic: MIN is from 1 to MAX" ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
if [ -n "${SLURM_JOB_ID:-}" ] && [ ! -d "$here/common" ]; then # a copy that sbatch made
    submitted=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
    here=$(cd "$SLURM_SUBMIT_DIR" && cd "$(dirname "$submitted")" && pwd)
fi
tools() { PYTHONPATH=$here exec python3 -m common.machines "$@"; }
command -v torchrun >/dev/null || fail "torchrun is not found: activate the environment in which torch is installed"
case ${1:-} in '' | -*) set -- "$here/ddp_torchrun.py" "$@" ;; esac
[ -f "$1" ] || [ ! -f "$here/$1" ] || set -- "$here/$1" "${@:2}"
[ -f "$1" ] || fail "there is no script $1 here"

# ------------------------------------------------------------------------------- several machines on this one
if [ -n "$simulate" ]; then
    passed=(--nproc-per-node="${nproc_per_node:-1}" --max-restarts="$max_restarts" --timeout="$timeout")
    passed+=(${elastic:+--elastic="$elastic"} ${check:+--check} ${dry_run:+--dry-run})
    export CUDA_VISIBLE_DEVICES='' # they would all take the same devices
    tools --nnodes "$simulate" --master-port "${master_port:-0}" ${elastic:+--elastic} simulate \
        bash "$here/ddp_multinode.sh" "${passed[@]}" -- "$@"
fi

# ----------------------------------------------------------------------------------------------------- SLURM
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "$nnodes$node_rank$master_addr$elastic" ]; then
    nodes=${SLURM_STEP_NUM_NODES:-$SLURM_JOB_NUM_NODES} tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-1}}
    ((tasks <= nodes && ${SLURM_NTASKS_PER_NODE:-1} == 1)) ||
        fail "SLURM has $tasks tasks for $nodes nodes, and torchrun would start all processes for each: take --ntasks-per-node=1"
    if [ -z "${SLURM_STEP_NUM_TASKS:-}" ]; then # the batch script: this script again, once on each node
        status=0
        supervise srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \
            bash "$here/ddp_multinode.sh" "${given[@]}" || status=$?
        if [ "$status" = 143 ] && [[ " $* " = *" --snapshot"[\ =]* ]] &&
            [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then # not where the job is cancelled
            printf 'requeued: goes on from the snapshot\n'
            scontrol requeue "$SLURM_JOB_ID"
        fi
        exit "$status"
    fi
    nnodes=$nodes node_rank=$SLURM_NODEID nproc_per_node=${nproc_per_node:-${SLURM_GPUS_ON_NODE:-}}
    read -r master_addr < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
    master_port=${master_port:-$((20000 + SLURM_JOB_ID % 10000))} # two jobs may share a node
fi

# --------------------------------------------------------------------------------------------- on each machine
needed=(nnodes node_rank master_addr)
[ -z "$elastic" ] || needed=(master_addr)
for name in "${needed[@]}"; do
    [ -n "${!name}" ] || fail "--${name//_/-} is missing, see --help"
done
[ -n "$elastic" ] || [ "$node_rank" -lt "$nnodes" ] ||
    fail "--node-rank $node_rank must be below --nnodes $nnodes: machines are counted from 0"
master_port=${master_port:-29500}
[ -n "$nproc_per_node" ] || nproc_per_node=$(python3 -c 'import torch; print(torch.accelerator.device_count() or 1)')
place=$(tools --nnodes "${nnodes:-0}" ${node_rank:+--node-rank "$node_rank"} --master-addr "$master_addr" \
    --master-port "$master_port" --timeout "$timeout" ${elastic:+--elastic} ${dry_run:+--dry-run} meet)
read -r master own is_host <<<"$place"

if [ -n "$elastic" ]; then
    # The processes meet at a new port after each restart: in torchrun's own store they would find the dead attempt's.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    command=(torchrun --nnodes="$elastic" --max-restarts="$max_restarts" --rdzv-backend=c10d --rdzv-id=ddp
        --rdzv-endpoint="$master:$master_port" --rdzv-conf="is_host=$is_host,join_timeout=$timeout,last_call_timeout=15")
else
    command=(torchrun --nnodes="$nnodes" --node-rank="$node_rank" --master-addr="$master" --master-port="$master_port"
        --rdzv-conf="timeout=$timeout")
fi
command+=(--nproc-per-node="$nproc_per_node" --local-addr="$own")
if [ -n "$check" ]; then
    export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
    command+=(-m common.check --timeout "$timeout" "${@:2}")
else
    command+=("$@")
fi
printf '+'
[ -z "$elastic" ] || printf ' TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1'
printf ' %q' "${command[@]}"
printf '\n'
[ -n "$dry_run" ] || supervise "${command[@]}"
