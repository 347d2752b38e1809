#!/usr/bin/env bash
# Train on a Ray that runs:  RAY_ADDRESS=http://HEAD:8265 RUNS=/shared/runs examples/cluster/ray_job.sh CONFIG [section.key=value ...]
# gspo-gym is installed on every node. RUNS is a folder on a file system that all nodes share: the job's own folder is a
# copy on one node, and is gone when the job has ended.
set -euo pipefail

config=$1
folder=${RUNS:?a folder that all nodes share, where the runs are}
shift
# Ray tells the command its address: nothing else says where the learner's processes go.
ray job submit --working-dir . -- gspo-gym train "$config" --resume=auto \
  compute.gpu_count=0 compute.nodes=2 topology.type=cluster \
  topology.gpus_for_vllm=1 topology.gpus_for_training=2 rollout.engine=local \
  "run.folder=$folder" "$@"
