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
#   --timeout SECONDS          how long to wait for the other machines; default 600
#   --simulate N               N machines on this one, on the CPU; the other options hold for each
#   --check                    do not train: join, show all ranks, test and measure the connections
#   -- SCRIPT ARGUMENTS        default: ddp_torchrun.py, as it lies beside this file
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [ -n "${SLURM_JOB_ID:-}" ] && [ ! -d "$here/common" ]; then # a copy that sbatch made
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # the array's own id stands for all tasks
    submitted=$(scontrol show job "${job:-$SLURM_JOB_ID}" | sed -n 's/^ *Command=//p') # with its arguments
    until [ -f "$submitted" ] || [ "$submitted" = "${submitted% *}" ]; do submitted=${submitted% *}; done
    here=$(cd "$SLURM_SUBMIT_DIR" && cd "$(dirname "$submitted")" && pwd)
fi
case ${1:-} in --help | -h) sed -n '/^# Two/,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # also for --check
exec python3 -m common.multinode "$@"
