"""Momentum Contrast as a detectron2 plugin. Importing it registers everything it adds."""

from moco_d2.requirements import check_requirements

check_requirements()

from moco_d2.config import add_moco_config  # noqa: E402
from moco_d2.data.cityscapes import provide_cityscapes_labels  # noqa: E402
from moco_d2.data.synthetic import register_demo_datasets  # noqa: E402
from moco_d2.data.voc import register_voc_datasets  # noqa: E402
from moco_d2.modeling import classifier as _classifier  # noqa: E402, F401 (registers by import)
from moco_d2.modeling import dc5 as _dc5  # noqa: E402, F401
from moco_d2.modeling import fcn_head as _fcn_head  # noqa: E402, F401
from moco_d2.modeling import fpn as _fpn  # noqa: E402, F401
from moco_d2.modeling import moco as _moco  # noqa: E402, F401
from moco_d2.modeling import moco_v3 as _moco_v3  # noqa: E402, F401
from moco_d2.modeling import roi_heads as _roi_heads  # noqa: E402, F401
from moco_d2.modeling import vit as _vit  # noqa: E402, F401
from moco_d2.modeling import vit_pyramid as _vit_pyramid  # noqa: E402, F401

provide_cityscapes_labels()
register_demo_datasets()
register_voc_datasets()

__version__ = "0.1.0"
__all__ = ["__version__", "add_moco_config"]
