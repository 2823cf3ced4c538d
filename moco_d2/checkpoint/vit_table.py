"""The part of the table of formats that is about vision transformers."""

from moco_d2.checkpoint.convention import IMAGENET_RGB
from moco_d2.checkpoint.formats import WeightFormat
from moco_d2.checkpoint.vit import heads_if_all_agree, heads_of_torchvision, twelve_heads

_BLOCK = r"blocks\.0\.attn\.qkv\.weight"
_EXTRAS = r"cls_token|norm\..+"
# What mmpretrain calls timm's parts; its older releases say norm1 and norm2 for ln1 and ln2.
_MM_NAMES = (
    (r"^patch_embed\.projection\.", "patch_embed.proj."),
    (r"^(ln|norm)1\.", "norm."),
    (r"^layers\.", "blocks."),
    (r"\.ln([12])\.", r".norm\1."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
)
_MM_BLOCK = r"backbone\.layers\.0\.attn\.qkv\.weight"
_MM_AVERAGE = r"(momentum_encoder|target_net)\."

VIT_FORMATS: dict[str, WeightFormat] = {
    "moco_v3_vit": WeightFormat(
        title="MoCo v3 ViT, official",
        layout="facebookresearch/moco-v3: vits.py, moco/builder.py",
        signature=(r"base_encoder\." + _BLOCK,),
        encoders={"query": r"base_encoder\.", "key": r"momentum_encoder\."},
        naming="timm",
        dropped={r"head\..+": "projection head", r"predictor\..+": "predictor"},
        extras=_EXTRAS,
        heads=twelve_heads,
        convention=IMAGENET_RGB,
    ),
    "dino_vit": WeightFormat(
        title="a full DINO checkpoint of a ViT, official",
        layout="facebookresearch/dino: vision_transformer.py, main_dino.py",
        signature=(r"teacher\.backbone\." + _BLOCK,),
        encoders={"key": r"teacher\.", "query": r"student\."},
        prefix=r"backbone\.",
        naming="timm",
        dropped={r"head\..+": "projection head"},
        extras=_EXTRAS,
        convention=IMAGENET_RGB,
    ),
    "mmselfsup_vit": WeightFormat(
        title="MoCo v3 ViT of mmselfsup 1.x or mmpretrain",
        layout="open-mmlab/mmselfsup, mmpretrain: MoCoV3ViT",
        signature=(_MM_BLOCK, r"neck\..+"),
        encoders={"query": rf"(?!{_MM_AVERAGE})", "key": rf"(?={_MM_AVERAGE})"},
        prefix=rf"backbone\.|{_MM_AVERAGE}module\.0\.",
        own_names=_MM_NAMES,
        naming="timm",
        dropped={
            r"(neck|head)\..+": "head",
            rf"{_MM_AVERAGE}module\.1\..+": "head",
            rf"{_MM_AVERAGE}steps": "counter",
        },
        extras=_EXTRAS,
        heads=twelve_heads,
        convention=IMAGENET_RGB,
    ),
    "mmpretrain_vit": WeightFormat(
        title="a ViT classifier of mmpretrain or mmclassification; state its input convention",
        layout="open-mmlab/mmpretrain: models/backbones/vision_transformer.py",
        signature=(_MM_BLOCK, r"head\..+"),
        absent=(r"neck\..+",),
        prefix=r"backbone\.",
        own_names=_MM_NAMES,
        naming="timm",
        dropped={r"head\..+": "classifier"},
        extras=_EXTRAS,
        heads=heads_if_all_agree,
    ),
    "solo_vit": WeightFormat(
        title="solo-learn ViT",
        layout="vturrisi/solo-learn: solo/backbones/vit",
        signature=(r"backbone\." + _BLOCK, r"classifier\..+"),
        encoders={"query": r"(?!momentum_)", "key": r"(?=momentum_)"},
        prefix=r"(momentum_)?backbone\.",
        naming="timm",
        dropped={
            r"(momentum_)?classifier\..+": "classifier",
            r"(momentum_)?(projector|head)\..+": "projection head",
            r"predictor\..+": "predictor",
            r"dino_loss_func\..+": "loss",
            r"queue(_ptr)?": "dictionary of keys",
        },
        extras=_EXTRAS,
        heads=heads_if_all_agree,
        convention=IMAGENET_RGB,
    ),
    "timm_vit": WeightFormat(
        title="a state dict of a timm, DINO, DeiT or MAE ViT; state its input convention",
        layout="timm.models.vision_transformer",
        signature=(_BLOCK, r"cls_token"),
        naming="timm",
        dropped={
            r"head\..+": "classifier",
            r"(model_ema|state_dict_ema)\..+": "moving average of the weights",
        },
        extras=_EXTRAS,
    ),
    "torchvision_vit": WeightFormat(
        title="a state dict of a torchvision ViT",
        layout="torchvision.models.vision_transformer",
        signature=(r"encoder\.layers\.encoder_layer_0\.self_attention\.in_proj_weight",),
        dropped={r"heads\..+": "classifier"},
        extras=r"class_token|encoder\.ln\..+",
        heads=heads_of_torchvision,
        convention=IMAGENET_RGB,
    ),
    "detectron2_vit": WeightFormat(
        title="a ViT backbone file of detectron2, or of timm without class token",
        layout="detectron2: modeling/backbone/vit.py",
        signature=(r"(net\.)?" + _BLOCK,),
        absent=(r"cls_token",),
        prefix=r"(net\.)?",
        naming="detectron2",
        extras=r"norm\..+",
        heads=heads_if_all_agree,
    ),
}
