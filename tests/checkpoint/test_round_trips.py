"""detectron2 -> another library -> detectron2 is the same, bit by bit."""

import pytest
import timm
import torch
import torchvision
from layouts import SAMPLES, states

from moco_d2.checkpoint import WeightsError, convert
from moco_d2.checkpoint.files import read_weight_file

NETWORKS = {
    "resnet18": ".pth",
    "resnet34": ".safetensors",
    "resnet50": ".pth.tar",
    "resnet101": ".pth",
    "resnext50_32x4d": ".safetensors",
}


@pytest.fixture(autouse=True)
def few_threads():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=NETWORKS)
def backbone(request, tmp_path_factory):
    """A detectron2 backbone file, and the torchvision network that it was made from."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.save(states(request.param)[0], folder / "source.pth")
    convert(str(folder / "source.pth"), str(folder / "d2.pkl"))
    return request.param, folder / "d2.pkl"


@pytest.mark.parametrize("target", ["torchvision", "timm"])
def test_there_and_back_again(backbone, target, tmp_path):
    arch, path = backbone
    there, back = str(tmp_path / f"there{NETWORKS[arch]}"), str(tmp_path / "back.pkl")
    out = convert(str(path), there, target=target)
    convert(there, back)
    before, after = read_weight_file(str(path)), read_weight_file(back)
    assert list(after.state) == list(before.state)
    for name, tensor in before.state.items():
        assert tensor.dtype == after.state[name].dtype
        assert torch.equal(tensor, after.state[name])
    assert after.meta["input"] == before.meta["input"]
    assert after.meta["source"]["architecture"] == before.meta["source"]["architecture"]

    body = {n: t for n, t in states(arch)[0].items() if not n.startswith("fc.")}
    written = read_weight_file(there).state
    assert set(written) == set(body) == set(out.mapped.values())
    assert all(torch.equal(tensor, body[name]) for name, tensor in written.items())


def test_the_libraries_own_models_load_what_was_written(tmp_path):
    torch.save(states("resnet18")[0], tmp_path / "source.pth")
    for target, name in (("torchvision", "tv.pth"), ("timm", "timm.safetensors")):
        convert(str(tmp_path / "source.pth"), str(tmp_path / name), target=target)
    network = torchvision.models.resnet18(weights=None)
    content = torch.load(tmp_path / "tv.pth", weights_only=True)
    left = network.load_state_dict(content["state_dict"], strict=False)
    assert set(content) == {"state_dict", "input", "source"}
    assert left.unexpected_keys == []
    assert left.missing_keys == ["fc.weight", "fc.bias"]
    pretrained = str(tmp_path / "timm.safetensors")
    model = timm.create_model("resnet18", num_classes=0, checkpoint_path=pretrained)
    assert torch.equal(model.layer4[1].conv2.weight, states("resnet18")[0]["layer4.1.conv2.weight"])


def test_strides_that_a_library_does_not_have_are_refused(tmp_path):
    path = str(SAMPLES["caffe2"].save(tmp_path))
    with pytest.raises(WeightsError, match="strides in 1x1 convolutions, and torchvision's"):
        convert(path, str(tmp_path / "out.pth"), target="torchvision")


def test_a_part_of_a_network_is_refused(tmp_path):
    state = {n: t for n, t in states("resnet18")[0].items() if "layer4" not in n}
    torch.save(state, tmp_path / "cut.pth")
    with pytest.raises(WeightsError, match="missing: layer4.0.conv1.weight"):
        convert(str(tmp_path / "cut.pth"), str(tmp_path / "out.pth"), target="timm")


def test_targets_and_their_files_are_checked(tmp_path):
    torch.save(states("resnet18")[0], tmp_path / "tv.pth")
    source = str(tmp_path / "tv.pth")
    with pytest.raises(
        WeightsError, match="no target 'keras'; known: detectron2, torchvision, tim"
    ):
        convert(source, str(tmp_path / "out.pth"), target="keras")
    with pytest.raises(WeightsError, match="must end in .pth or .pth.tar or .safetensors"):
        convert(source, str(tmp_path / "out.pkl"), target="timm")
    assert [p.name for p in tmp_path.iterdir()] == ["tv.pth"]
