#!/usr/bin/env python
"""Train or evaluate: MoCo pretraining, and detectron2's models on exported weights.

Pretrain on ImageNet with 8 GPUs, then on your own folder of images with one:

    tools/train_net.py --config configs/moco_pretrain.yaml --num-gpus 8
    tools/train_net.py --config configs/moco_pretrain.yaml DATASETS.TRAIN "('path/to/images',)"

Fine-tune Faster R-CNN on VOC from an exported backbone, and evaluate a finished run:

    tools/train_net.py --config configs/transfer/voc_0712_R50_C4_24k.yaml --num-gpus 8 \\
        MODEL.WEIGHTS moco_r50.pkl OUTPUT_DIR output/voc
    tools/train_net.py --config configs/transfer/voc_0712_R50_C4_24k.yaml --eval-only \\
        MODEL.WEIGHTS output/voc/model_final.pth

Go on with a run that was stopped, by SIGTERM, Ctrl-C or a crash: the same command with --resume.
On a machine without a GPU, --num-gpus counts processes. Under torchrun and srun, processes find
each other without further arguments:

    torchrun --nproc_per_node 8 tools/train_net.py --config configs/moco_pretrain.yaml
"""

import os
import sys

# On CPU, loader workers share the cores with OpenMP's threads, which by default spin while they
# wait and starve them. Read once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from moco_d2.engine.setup import run


def main(argv: list[str] | None = None) -> int:
    return run(argv, epilog=__doc__)


if __name__ == "__main__":
    sys.exit(main())
