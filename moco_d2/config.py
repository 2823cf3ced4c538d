"""Every config key that this project adds to detectron2's, its default and what it does."""

from detectron2.config import CfgNode as CN


def add_moco_config(cfg: CN) -> None:
    """Add the keys of this project to a detectron2 config, in place.

    Floats are declared as floats: detectron2 refuses an int where a float is declared.

    Args:
        cfg: a config from :func:`detectron2.config.get_cfg`.
    """
    # How often metrics are written, in iterations, and the window they are smoothed over.
    # 1 writes every raw value.
    cfg.LOG_PERIOD = 20

    cfg.MODEL.MOCO = CN()
    # Length of the representation that queries and keys are compared in.
    cfg.MODEL.MOCO.DIM = 128
    # Projection head: "linear" (v1), "mlp" (v2: ReLUs between) or "mlp_bn" (v3: batch norms, too).
    cfg.MODEL.MOCO.HEAD = "mlp"
    # Layers of an MLP head. 2, but 3 for v3 with a ViT.
    cfg.MODEL.MOCO.HEAD_LAYERS = 2
    # Width of hidden layers in MLP heads; 0 takes the width of the head's input (v2).
    cfg.MODEL.MOCO.MLP_DIM = 0
    # MoCoV3: end the predictor in a batch norm, as v3 does with a ViT.
    cfg.MODEL.MOCO.PREDICTOR_LAST_NORM = False
    # Momentum m of the key encoder: k <- m k + (1 - m) q.
    cfg.MODEL.MOCO.MOMENTUM = 0.999
    # "constant", or "cosine": m rises from MOMENTUM to 1 over the run on half a cosine (v3).
    cfg.MODEL.MOCO.MOMENTUM_SCHEDULE = "constant"
    # Temperature tau of the InfoNCE loss. v1: 0.07, v2: 0.2.
    cfg.MODEL.MOCO.TEMPERATURE = 0.2
    # Where the keys come from (Figure 2 of the v1 paper): "queue" is MoCo; "memory_bank" and
    # "in_batch" (end-to-end) are what the paper compares it with.
    cfg.MODEL.MOCO.DICTIONARY = "queue"
    # Number of keys K in the dictionary; of a memory bank, drawn from it in each step. It need not
    # be a multiple of the batch.
    cfg.MODEL.MOCO.QUEUE_SIZE = 65536
    # Momentum of an image's representation in the memory bank (InstDisc).
    cfg.MODEL.MOCO.BANK_MOMENTUM = 0.5
    # Images that the memory bank has room for; 0: as many as DATASETS.TRAIN has.
    cfg.MODEL.MOCO.BANK_SIZE = 0
    # Each view is the query once and the key once; the loss is the mean of both directions.
    cfg.MODEL.MOCO.SYMMETRIC = False
    # Encode the keys of a step in BN groups drawn at random from the whole batch. Off, the loss
    # can be solved by reading which images shared a BN group (Sec. 3.3 of the v1 paper).
    cfg.MODEL.MOCO.SHUFFLE_BN = True

    # Keep a ViT's projection of patches at its random weights (v3, Sec. 4.2: stabler training).
    cfg.MODEL.MOCO.FREEZE_PATCH_PROJECTION = False

    # The ViT of build_vit_backbone (pretraining) and build_vit_sfp_backbone (detectors): ViT-B/16.
    cfg.MODEL.VIT = CN()
    cfg.MODEL.VIT.EMBED_DIM = 768
    cfg.MODEL.VIT.DEPTH = 12
    # MoCo v3's ViT-S has 12, others' 6: no tensor shows it.
    cfg.MODEL.VIT.NUM_HEADS = 12
    cfg.MODEL.VIT.PATCH_SIZE = 16
    # Side, in pixels, of the images that the table of positions is for: that of the pretraining's
    # views. For other images the table is stretched.
    cfg.MODEL.VIT.IMG_SIZE = 224
    # Width of an MLP's hidden layer, in EMBED_DIM.
    cfg.MODEL.VIT.MLP_RATIO = 4.0
    # Whether queries, keys and values have a bias.
    cfg.MODEL.VIT.QKV_BIAS = True
    # Pretraining: features are those of a class token, not of average pooling. Detectors: the
    # pretrained ViT had one, so that its table of positions has an entry for it, which is not used.
    cfg.MODEL.VIT.CLASS_TOKEN = False
    # The rest is for detectors. Largest rate of stochastic depth; blocks from 0 up to it.
    cfg.MODEL.VIT.DROP_PATH = 0.0
    # Blocks, from 0, whose attention sees windows of WINDOW_SIZE x WINDOW_SIZE patches; 0: none.
    cfg.MODEL.VIT.WINDOW_SIZE = 0
    cfg.MODEL.VIT.WINDOW_BLOCKS = ()
    # Learn relative positions besides; they start at zero.
    cfg.MODEL.VIT.USE_REL_POS = False
    # Pad all images to squares of so many pixels; 0: to the largest of the batch.
    cfg.MODEL.VIT.SQUARE_PAD = 0

    cfg.MODEL.CLASSIFIER = CN()
    # Classes that ImageClassifier tells apart; 0: those of DATASETS.TRAIN.
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = 0
    # Share of each target that is spread evenly over all classes.
    cfg.MODEL.CLASSIFIER.LABEL_SMOOTHING = 0.0
    # Linear classification: train the last layer alone. The backbone stays in eval mode, and that
    # none of its tensors has changed is checked.
    cfg.MODEL.CLASSIFIER.FREEZE_BACKBONE = False
    # Allow FREEZE_BACKBONE without MODEL.WEIGHTS: what random features are worth.
    cfg.MODEL.CLASSIFIER.RANDOM_BACKBONE = False

    # Residual blocks begin as the identity: their last norm's scale is zero (v3). Pretraining only.
    cfg.MODEL.RESNETS.ZERO_INIT_RESIDUAL = False

    # Images that share BN statistics in pretraining, on however many processes they lie.
    # 0: the whole global batch, which is SyncBN.
    cfg.MODEL.BN_GROUP_SIZE = 32
    # Keep activations channels-last; faster convolutions on most hardware, same results up to
    # rounding.
    cfg.MODEL.CHANNELS_LAST = False
    # Compile the encoders with torch.compile in pretraining: minutes at the start for shorter
    # steps. Where it does not work, one warning and on without.
    cfg.MODEL.COMPILE = False

    # The input convention of MODEL.WEIGHTS (channel order, mean, std, stride) overrides the
    # config's, and a config or command that states another one stops. False: the config's is used.
    cfg.INPUT.FOLLOW_WEIGHTS = True

    # Detectors: resize images at random to 0.1 to 2 times this size, in pixels, and crop them to
    # it, in place of MIN_SIZE_TRAIN and MAX_SIZE_TRAIN (large-scale jitter). 0: not.
    cfg.INPUT.SCALE_JITTER = 0

    cfg.INPUT.VIEWS = CN()
    # Side of the square views that the encoders see, in pixels.
    cfg.INPUT.VIEWS.SIZE = 224
    # View recipes of the query's and the key's image; see moco_d2/data/augmentation.py.
    cfg.INPUT.VIEWS.QUERY = "moco_v2"
    cfg.INPUT.VIEWS.KEY = "moco_v2"
    # Smallest share of an image's area that a crop shows; 0: that of the recipes.
    cfg.INPUT.VIEWS.MIN_CROP = 0.0
    # Values of 16-bit images that become 0 and 255. tools/dataset_stats.py measures them.
    cfg.INPUT.DEEP_RANGE = (0, 65535)
    # Images with more pixels are left out undecoded: kilobytes of a file can hold gigabytes.
    cfg.INPUT.MAX_PIXELS = 200_000_000

    # Train with a part of the labels, drawn by SEED: a share of the images of each class (of all
    # images, for detectors) if below 1, from 1 on so many images of each. 0: all.
    cfg.DATASETS.FEW_LABELS = 0.0

    cfg.INPUT.SEM_SEG = CN()
    # Side of the square crops that a SemanticSegmentor is trained on, in pixels, padded where the
    # picture ends. 0: detectron2's own augmentations.
    cfg.INPUT.SEM_SEG.CROP_SIZE = 0
    # Before the crop, a picture is resized by a factor drawn from this range.
    cfg.INPUT.SEM_SEG.SCALE = (0.5, 2.0)

    # Largest share of the images that may be unreadable; they are left out and named. Pretraining
    # only.
    cfg.DATALOADER.MAX_UNREADABLE = 0.01
    # Keep decoded images, shrunk to what views can show, for the epochs to come: "none", "ram"
    # (shared memory) or "disk" ($MOCO_D2_CACHE, by default ~/.cache/moco_d2). Shared by the
    # processes of a machine. Pretraining only.
    cfg.DATALOADER.CACHE = "none"
    # Size of that cache at most, in 10^9 bytes; what finds no room is decoded every time.
    cfg.DATALOADER.CACHE_GB = 8.0

    # "SGD", "LARS" (pretraining only) or "ADAMW".
    cfg.SOLVER.OPTIMIZER = "SGD"
    # Passes over the data set. More than 0: MAX_ITER is computed, and STEPS and WARMUP_EPOCHS
    # are read as epochs. 0: MAX_ITER, STEPS and WARMUP_ITERS count iterations.
    cfg.SOLVER.EPOCHS = 0
    cfg.SOLVER.WARMUP_EPOCHS = 0.0
    # Detectors with a ViT: the learning rate of a block, in that of the next; 1.0: the same.
    cfg.SOLVER.LAYER_DECAY = 1.0
    # Parts that each process's share of a step is computed in, one after the other, to save memory.
    # Pretraining only. Losses, keys and weights are those of the undivided batch.
    cfg.SOLVER.ACCUMULATE = 1
    # Multiply BASE_LR by IMS_PER_BATCH / REFERENCE_BATCH (the linear scaling rule).
    cfg.SOLVER.SCALE_LR_TO_BATCH = False
    cfg.SOLVER.REFERENCE_BATCH = 256
    # How many checkpoints are kept, the newest; older ones are removed. 0: all. With 1, there is
    # none to go back to should that one be damaged.
    cfg.SOLVER.CHECKPOINT_KEEP = 0
    # Besides these, the checkpoint of every so many iterations; a multiple of CHECKPOINT_PERIOD.
    cfg.SOLVER.CHECKPOINT_ARCHIVE_PERIOD = 0
    # Data type of mixed precision when SOLVER.AMP.ENABLED: "float16" (GPU only) or "bfloat16".
    cfg.SOLVER.AMP.PRECISION = "float16"

    cfg.MONITORS = CN()
    # Every so many iterations, similarities, the spread of the queries and the distance of the
    # encoders are logged in pretraining; see docs/monitoring.md. 0: not.
    cfg.MONITORS.PERIOD = 100
    # The same for pictures of view pairs in TensorBoard; each evaluation adds nearest neighbours.
    # 0: no pictures.
    cfg.MONITORS.PICTURE_PERIOD = 1000

    cfg.TEST.KNN = CN()
    # Labelled image set whose features vote on the labels of DATASETS.TEST when a pretrained
    # backbone is evaluated. "": the test set itself, each image without its own vote.
    cfg.TEST.KNN.BANK = ""
    # At most so many images of the bank, drawn once; 0: all.
    cfg.TEST.KNN.BANK_SIZE = 0
    # At most so many images of each set of DATASETS.TEST, drawn once; 0: all.
    cfg.TEST.KNN.TEST_SIZE = 0
    # Neighbours that vote, and the temperature of their weights exp(similarity / T).
    cfg.TEST.KNN.K = 20
    cfg.TEST.KNN.TEMPERATURE = 0.07
