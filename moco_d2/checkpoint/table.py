"""The table of the formats that can be read: one entry each, and nothing else knows them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from moco_d2.checkpoint.convention import IMAGENET_RGB
from moco_d2.checkpoint.formats import WeightFormat
from moco_d2.checkpoint.networks import TorchvisionFeatures
from moco_d2.checkpoint.vit_table import VIT_FORMATS

_SWAV = {**IMAGENET_RGB, "pixel_std": [58.14, 57.12, 57.375]}
_UNIT_RANGE = {**IMAGENET_RGB, "pixel_mean": [0.0] * 3, "pixel_std": [255.0] * 3}
_CAFFE2 = {
    "format": "BGR",
    "pixel_mean": [103.53, 116.28, 123.675],
    "pixel_std": [1.0, 1.0, 1.0],
    "stride_in_1x1": True,
}


def _caffe2_convention(architecture: Mapping) -> dict[str, Any]:
    """The std is part of the first convolution, but not so in the ResNeXts; nor is the stride."""
    if architecture["num_groups"] == 1:
        return _CAFFE2
    return {**_CAFFE2, "pixel_std": [57.375, 57.12, 58.395], "stride_in_1x1": False}


def _caffe2_network(architecture: Mapping, stated: Mapping) -> TorchvisionFeatures:
    plain = architecture["num_groups"] == 1
    std = (1 / 255,) * 3 if plain else (0.225, 0.224, 0.229)
    mean = (0.406, 0.456, 0.485)
    own = {"mean": mean, "std": std, "channels": "BGR", "stride_in_1x1": plain}
    return TorchvisionFeatures(architecture, stated, **own)


_QUEUE = {r"queue2?(_ptr)?": "dictionary of keys"}
_FIRST_BLOCK = r"layer1\.0\.conv1\.weight"
# mmselfsup 1.x keeps the moving average in a wrapper, of a Sequential(backbone, neck).
_MM_AVERAGE = r"(encoder_k|momentum_encoder|target_net)\."
# lightly marks the other encoder before or behind the name, depending on the example.
_LIGHTLY_KEY = r"(?:(?:key|teacher)_|\w+_momentum\.)"
# Children of torchvision's ResNet by their position.
_POSITIONS = (
    (r"^0\.", "conv1."),
    (r"^1\.", "bn1."),
    (r"^([4-7])\.(?=\d)", lambda m: f"layer{int(m[1]) - 3}."),
)

FORMATS: dict[str, WeightFormat] = {
    "moco_d2": WeightFormat(
        title="a pretraining checkpoint of this project (MoCo, MoCoV3)",
        layout="moco_d2/modeling/moco.py",
        signature=(r"encoder_q\.backbone\..+",),
        encoders={"query": r"encoder_q\.", "key": r"encoder_k\."},
        prefix=r"backbone\.",
        naming="detectron2",
        dropped={
            r"head\..+": "projection head",
            r"predictor\..+": "predictor",
            r"dictionary\..+": "dictionary of keys",
        },
        extras=r"cls_token|norm\..+",
    ),
    "moco_d2_classifier": WeightFormat(
        title="a checkpoint of this project's ImageClassifier",
        layout="backbone, alone or inside an encoder, and the classifier behind it",
        signature=(
            r"encoder\.backbone\..+|backbone\.(stem|res2)\..+",
            r"(classifier|(encoder\.)?head|fc)\..+",
        ),
        prefix=r"(encoder\.)?backbone\.",
        naming="detectron2",
        dropped={r"(classifier|(encoder\.)?head|fc)\..+": "classifier"},
        extras=r"cls_token|norm\..+",
    ),
    "moco": WeightFormat(
        title="MoCo v1 and v2, official",
        layout="facebookresearch/moco: moco/builder.py",
        signature=(r"encoder_q\." + _FIRST_BLOCK,),
        encoders={"query": r"encoder_q\.", "key": r"encoder_k\."},
        dropped={r"fc\..+": "projection head", **_QUEUE},
        convention=IMAGENET_RGB,
    ),
    "moco_v3": WeightFormat(
        title="MoCo v3 ResNet, official",
        layout="facebookresearch/moco-v3: moco/builder.py",
        signature=(r"base_encoder\." + _FIRST_BLOCK,),
        encoders={"query": r"base_encoder\.", "key": r"momentum_encoder\."},
        dropped={r"fc\..+": "projection head", r"predictor\..+": "predictor"},
        convention=IMAGENET_RGB,
    ),
    "simsiam": WeightFormat(
        title="SimSiam, official",
        layout="facebookresearch/simsiam: simsiam/builder.py",
        signature=(r"encoder\." + _FIRST_BLOCK, r"encoder\.fc\..+"),
        prefix=r"encoder\.",
        dropped={r"encoder\.fc\..+": "projection head", r"predictor\..+": "predictor"},
        convention=IMAGENET_RGB,
    ),
    "swav": WeightFormat(
        title="SwAV, DeepCluster v2 and SeLa v2, official",
        layout="facebookresearch/swav: src/resnet50.py",
        signature=(_FIRST_BLOCK, r"(projection_head|prototypes)\..+"),
        dropped={r"projection_head\..+": "projection head", r"prototypes\..+": "prototypes"},
        convention=_SWAV,
        network=partial(TorchvisionFeatures, std=(0.228, 0.224, 0.225)),
    ),
    "byol": WeightFormat(
        title="BYOL of PyTorch-BYOL",
        layout="sthalles/PyTorch-BYOL: models/resnet_base_network.py, trainer.py",
        signature=(r"online_network\.encoder\.4\.0\.conv1\.weight",),
        encoders={"query": r"online_network\.", "key": r"target_network\."},
        prefix=r"encoder\.",
        own_names=_POSITIONS,
        dropped={r"projetion\..+": "projection head"},
        convention=_UNIT_RANGE,
        network=partial(TorchvisionFeatures, mean=(0.0,) * 3, std=(1.0,) * 3),
    ),
    "byol_pytorch": WeightFormat(
        title="a BYOL learner of byol-pytorch",
        layout="lucidrains/byol-pytorch: byol_pytorch/byol_pytorch.py",
        signature=(r"online_encoder\.net\." + _FIRST_BLOCK,),
        encoders={"query": r"(?!target_encoder\.)", "key": r"(?=target_encoder\.)"},
        prefix=r"(online|target)_encoder\.net\.",
        dropped={
            r"(online|target)_encoder\.net\.fc\..+": "classifier",
            r"(online|target)_encoder\.projector\..+": "projection head",
            r"online_predictor\..+": "predictor",
            r"net\..+": "second name of a tensor of the query encoder",
        },
        convention=IMAGENET_RGB,
    ),
    "dino": WeightFormat(
        title="a full DINO checkpoint of a ResNet, official",
        layout="facebookresearch/dino: main_dino.py, utils.py",
        signature=(r"teacher\.backbone\." + _FIRST_BLOCK,),
        # The teacher, which is what DINO publishes, comes first.
        encoders={"key": r"teacher\.", "query": r"student\."},
        prefix=r"backbone\.",
        dropped={r"head\..+": "projection head"},
        convention=IMAGENET_RGB,
    ),
    "barlowtwins": WeightFormat(
        title="a full Barlow Twins checkpoint, official",
        layout="facebookresearch/barlowtwins: main.py",
        signature=(r"backbone\." + _FIRST_BLOCK, r"projector\..+", r"bn\.running_mean"),
        prefix=r"backbone\.",
        dropped={r"projector\..+": "projection head", r"bn\..+": "norm of the loss"},
        convention=IMAGENET_RGB,
    ),
    "vissl": WeightFormat(
        title="a VISSL checkpoint of a ResNet or ResNeXt",
        layout="facebookresearch/vissl: vissl/models/trunks/resnext.py",
        signature=(r"(trunk\.)?_feature_blocks\." + _FIRST_BLOCK,),
        prefix=r"(trunk\.)?_feature_blocks\.",
        dropped={r"heads\..+": "heads"},
        convention=IMAGENET_RGB,
    ),
    "mmselfsup": WeightFormat(
        title="mmselfsup 1.x, and self-supervised methods of mmpretrain",
        layout="open-mmlab/mmselfsup, mmpretrain: models/algorithms, models/selfsup",
        signature=(r"backbone\." + _FIRST_BLOCK, r"neck\..+"),
        absent=(r"(encoder_q|base_encoder|online_net)\..+",),
        encoders={"query": rf"(?!{_MM_AVERAGE})", "key": rf"(?={_MM_AVERAGE})"},
        prefix=rf"backbone\.|{_MM_AVERAGE}module\.0\.",
        dropped={
            r"(neck|head)\..+": "head",
            rf"{_MM_AVERAGE}module\.1\..+": "head",
            rf"{_MM_AVERAGE}steps": "counter",
            **_QUEUE,
        },
        convention=IMAGENET_RGB,
    ),
    "openselfsup": WeightFormat(
        title="OpenSelfSup and mmselfsup 0.x, methods with two encoders",
        layout="open-mmlab/mmselfsup, branches openselfsup and 0.x: models/algorithms",
        signature=(r"(encoder_q|base_encoder|online_net)\.0\." + _FIRST_BLOCK,),
        absent=(r"queue2",),
        encoders={
            "query": r"(encoder_q|base_encoder|online_net)\.",
            "key": r"(encoder_k|momentum_encoder|target_net)\.",
        },
        prefix=r"0\.",
        dropped={
            r"1\..+|(neck|head)\..+": "head",
            r"backbone\..+": "second name of a tensor of the query encoder",
            **_QUEUE,
        },
        convention=IMAGENET_RGB,
    ),
    "densecl": WeightFormat(
        title="DenseCL, official",
        layout="WXinlong/DenseCL: openselfsup/models/densecl.py",
        signature=(r"encoder_q\.0\." + _FIRST_BLOCK, r"queue2"),
        encoders={"query": r"encoder_q\.", "key": r"encoder_k\."},
        prefix=r"0\.",
        dropped={
            r"1\..+|(neck|head)\..+": "projection heads",
            r"backbone\..+": "second name of a tensor of the query encoder",
            **_QUEUE,
        },
        convention=IMAGENET_RGB,
    ),
    "mmpretrain": WeightFormat(
        title="a classifier of mmpretrain or mmclassification",
        layout="open-mmlab/mmpretrain: models/backbones/resnet.py",
        signature=(r"backbone\." + _FIRST_BLOCK, r"head\..+"),
        absent=(r"(neck|momentum_head|classifier|projection_head|projector)\..+",),
        prefix=r"backbone\.",
        dropped={r"head\..+": "classifier"},
        convention=IMAGENET_RGB,
    ),
    "lightly": WeightFormat(
        title="a model of lightly's examples and benchmarks",
        layout="lightly-ai/lightly: examples/pytorch, benchmarks/imagenet/resnet50",
        signature=(r"backbone\.(layer1|4)\.0\.conv1\.weight", r"\w*projection_head\w*\..+"),
        encoders={"query": rf"(?!{_LIGHTLY_KEY})", "key": rf"(?={_LIGHTLY_KEY})"},
        prefix=r"((key|teacher)_)?backbone(_momentum)?\.",
        own_names=_POSITIONS,
        dropped={
            r"\w*projection_head\w*\..+": "projection head",
            r"prediction_head\..+": "predictor",
            r"prototypes\..+": "prototypes",
            r"student_.+": "student of the encoder that is kept",
            r"online_classifier\..+": "classifier",
            r"\w*criterion\w*\..+": "loss",
        },
        convention=IMAGENET_RGB,
    ),
    "solo": WeightFormat(
        title="solo-learn",
        layout="vturrisi/solo-learn: solo/methods/base.py",
        signature=(r"backbone\." + _FIRST_BLOCK, r"classifier\..+"),
        encoders={"query": r"(?!momentum_)", "key": r"(?=momentum_)"},
        prefix=r"(momentum_)?backbone\.",
        dropped={
            r"(momentum_)?classifier\..+": "classifier",
            r"(momentum_)?(projector|head)\..+": "projection head",
            r"predictor\..+": "predictor",
            r"prototypes\..+": "prototypes",
            r"dino_loss_func\..+": "loss",
            **_QUEUE,
        },
        convention=IMAGENET_RGB,
    ),
    "pixpro": WeightFormat(
        title="PixPro, official",
        layout="zdaxie/PixPro: contrast/models/PixPro.py",
        signature=(r"encoder\." + _FIRST_BLOCK, r"encoder_k\." + _FIRST_BLOCK),
        encoders={"query": r"encoder\.", "key": r"encoder_k\."},
        dropped={
            r"projector(_instance)?(_k)?\..+": "projection head",
            r"(value_transform|predictor)\..+": "predictor",
        },
        convention=IMAGENET_RGB,
    ),
    "pycontrast": WeightFormat(
        title="PyContrast and InfoMin, RGB models",
        layout="HobbitLong/PyContrast: pycontrast/networks/build_backbone.py",
        signature=(r"encoder\." + _FIRST_BLOCK, r"head\..+"),
        absent=(r"encoder_k\..+",),
        encoders={"query": r"(?!model_ema\.)", "key": r"model_ema\."},
        prefix=r"encoder\.",
        dropped={r"head(_jig)?\..+": "projection head"},
        convention=IMAGENET_RGB,
    ),
    "torchvision": WeightFormat(
        title="a state dict of a torchvision ResNet, ResNeXt or wide ResNet",
        layout="torchvision.models.resnet",
        signature=(_FIRST_BLOCK,),
        absent=(r"(projection_head|prototypes)\..+",),
        dropped={
            r"fc\..+": "classifier",
            r"(model_ema|state_dict_ema)\..+": "moving average of the weights",
        },
        convention=IMAGENET_RGB,
    ),
    "timm": WeightFormat(
        title="a state dict of a timm ResNet; has torchvision's names, and is detected as such",
        layout="timm.models.resnet",
        signature=(_FIRST_BLOCK,),
        naming="timm",
        dropped={
            r"fc\..+": "classifier",
            r"(model_ema|state_dict_ema)\..+": "moving average of the weights",
        },
        convention=IMAGENET_RGB,
        detected=False,
    ),
    "caffe2": WeightFormat(
        title="MSRA's and FAIR's ResNets in Caffe2's names (ImageNetPretrained/*.pkl)",
        layout="detectron2: checkpoint/c2_model_loading.py",
        signature=(r"res2_0_branch2a_w",),
        own_names=(
            (r"_bn_s$", "_bn.weight"),
            (r"_bn_b$", "_bn.bias"),
            (r"_bn_(rm|running_mean)$", "_bn.running_mean"),
            (r"_bn_(riv|running_var)$", "_bn.running_var"),
            (r"_w$", ".weight"),
            (r"^res_conv1_bn\.", "bn1."),
            (r"^res(\d)_(\d+)_", lambda m: f"layer{int(m[1]) - 1}.{m[2]}."),
            (r"\.branch1_bn\.", ".downsample.1."),
            (r"\.branch1\.", ".downsample.0."),
            (r"\.branch2([abc])_bn\.", lambda m: f".bn{'abc'.index(m[1]) + 1}."),
            (r"\.branch2([abc])\.", lambda m: f".conv{'abc'.index(m[1]) + 1}."),
        ),
        dropped={
            r"(fc\d+|pred)_[wb]": "classifier",
            r"conv1_b": "bias that detectron2's ResNet does not have",
            r".+_momentum": "state of the optimizer",
        },
        convention=_caffe2_convention,
        frozen_norms=True,
        network=_caffe2_network,
    ),
    "detectron2": WeightFormat(
        title="a backbone file of detectron2",
        layout="detectron2: modeling/backbone/resnet.py",
        signature=(r"res[2-5]\.\d+\.conv1\.weight",),
        naming="detectron2",
        dropped={r"stem\.fc\..+": "classifier or head that other converters keep as stem.fc"},
    ),
    **VIT_FORMATS,
}


def format_rows() -> list[tuple[str, str, str, str]]:
    """(name, title, encoders, input convention) of each format, in words."""
    rows = []
    for name, entry in FORMATS.items():
        convention = entry.convention
        if callable(convention):
            convention = convention({"num_groups": 1})
        stated = "stated by the file"
        if convention is not None:
            mean, std = (
                "/".join(f"{v:g}" for v in convention[k]) for k in ("pixel_mean", "pixel_std")
            )
            stride = "1x1" if convention["stride_in_1x1"] else "3x3"
            stated = f"{convention['format']}, mean {mean}, std {std}, stride in {stride}"
        rows.append((name, entry.title, ", ".join(entry.encoders) or "one", stated))
    return rows
