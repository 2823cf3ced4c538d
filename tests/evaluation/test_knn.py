"""kNN against a brute-force reference, and on image folders."""

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import tiny_pretrain_config

from moco_d2.data.datasets import load_image_index
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.evaluation import knn
from moco_d2.evaluation.features import _subset, evaluate_knn, extract_features
from moco_d2.evaluation.knn import accuracy, knn_predict, nearest_neighbours


def reference_votes(bank, labels, query, k, temperature, num_classes):
    similarity = np.array([float(np.dot(b, query)) for b in bank])
    votes = np.zeros(num_classes)
    for i in sorted(range(len(bank)), key=lambda i: -similarity[i])[:k]:
        votes[labels[i]] += np.exp(similarity[i] / temperature)
    return votes


@pytest.mark.parametrize("k", [1, 5, 200])
def test_votes_equal_brute_force(k):
    generator = torch.Generator().manual_seed(0)
    bank = F.normalize(torch.randn(60, 8, generator=generator, dtype=torch.float64), dim=1)
    queries = F.normalize(torch.randn(20, 8, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.randint(0, 4, (60,), generator=generator)
    ranked = knn_predict(bank, labels, queries, k=k, temperature=0.07, num_classes=4)
    for row, query in zip(ranked, queries, strict=True):
        votes = reference_votes(bank.numpy(), labels.numpy(), query.numpy(), k, 0.07, 4)
        assert (np.diff(votes[row.numpy()]) <= 0).all()


@pytest.mark.parametrize("k", [1, 4, 7, 30])
def test_of_equally_near_neighbours_the_first_in_the_bank_are_nearer(k, monkeypatch):
    """Each feature is there four times, and as many queries as one product may not hold."""
    monkeypatch.setattr(knn, "_SIMILARITIES", 100)
    rng = np.random.default_rng(0)
    # Exact in floating point, so that ties are.
    bank = np.tile(np.eye(6)[rng.permutation(6)] * [1, 1, 1, -1, -1, -1], (4, 1))
    queries = np.array([[0.6, 0.8, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0.6, 0, 0.8, 0, 0]] * 3)
    similarity, index = nearest_neighbours(*map(torch.from_numpy, (bank, queries)), k)
    expected = queries @ bank.T
    order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(index.numpy(), order)
    np.testing.assert_array_equal(similarity.numpy(), np.take_along_axis(expected, order, 1))


def test_of_equal_votes_the_lower_class_wins_and_cold_votes_do_not_overflow():
    bank = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([2, 1, 0])
    for temperature in (1.0, 1e-3):
        ranked = knn_predict(bank, labels, bank[:1], k=3, temperature=temperature, num_classes=4)
        assert ranked.tolist() == [[1, 2, 0, 3]]


def test_an_image_does_not_vote_for_itself():
    features = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), dim=1)
    labels = torch.tensor([0, 1, 0, 1])
    ranked = knn_predict(
        features, labels, features, k=1, temperature=0.1, num_classes=2, own_index=torch.arange(4)
    )
    assert ranked[:, 0].tolist() == [1, 0, 1, 0]


def test_accuracy_counts_labels_among_the_first():
    ranked = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 2, 0], [1, 0, 2]])
    labels = torch.tensor([2, 1, 0, 0])
    assert accuracy(ranked, labels, 1) == 25.0
    assert accuracy(ranked, labels, 2) == 75.0
    assert accuracy(ranked, labels, 5) == 100.0


def colour_folder(root, count, seed):
    """Two classes that any network tells apart: dark and bright."""
    rng = np.random.default_rng(seed)
    for label, base in (("bright", 200), ("dark", 30)):
        (root / label).mkdir(parents=True)
        for i in range(count):
            image = rng.integers(base - 20, base + 20, (40, 40, 3), dtype=np.uint8)
            cv2.imwrite(str(root / label / f"{i}.png"), image)
    return root


def test_eval_only_classifies_folders_with_and_without_a_bank(tmp_path):
    test, bank = (colour_folder(tmp_path / n, c, c) for n, c in (("test", 4), ("bank", 6)))
    options = {"DATASETS__TRAIN": (str(bank),), "DATASETS__TEST": (str(test),), "TEST__KNN__K": 3}
    for knn_bank in ("", str(bank)):
        cfg = tiny_pretrain_config(tmp_path / "out", TEST__KNN__BANK=knn_bank, **options)
        assert PretrainTrainer.eval_only(cfg) == {"knn": {"top1": 100.0, "top5": 100.0}}


def test_without_sets_to_judge_no_bank_is_asked_for(tmp_path):
    cfg = tiny_pretrain_config(DATASETS__TEST=(), TEST__KNN__BANK="nowhere")
    assert evaluate_knn(cfg, PretrainTrainer.build_model(cfg)) == {}


def test_a_limited_bank_holds_all_classes_though_labels_take_turns():
    """Every n-th image of a set whose labels take turns would miss classes."""
    labels = np.arange(1200) % 4
    chosen = _subset(1200, 300)
    assert len(set(chosen)) == 300 and (np.bincount(labels[chosen]) > 50).all()
    np.testing.assert_array_equal(chosen, _subset(1200, 300))
    assert len(_subset(1200, 0)) == len(_subset(1200, 5000)) == 1200


def test_an_image_that_cannot_be_read_is_left_out(tmp_path):
    """The others keep their own labels and do not vote for themselves."""
    test = colour_folder(tmp_path / "test", 5, 1)
    (test / "bright" / "1.png").write_bytes(b"no image")
    options = {"DATASETS__TRAIN": (str(test),), "DATASETS__TEST": (str(test),), "TEST__KNN__K": 3}
    cfg = tiny_pretrain_config(tmp_path / "out", **options)
    assert PretrainTrainer.eval_only(cfg) == {"knn": {"top1": 100.0, "top5": 100.0}}
    index = load_image_index([str(test)])
    chosen = np.array([7, 1, 0, 9])  # the second cannot be read
    features, labels, _ = extract_features(lambda b: b["label"][:, None], cfg, index, chosen)
    assert labels.tolist() == features[:, 0].tolist() == index.labels[[7, 0, 9]].tolist()


def test_sets_are_checked_before_a_run_starts(tmp_path):
    train, flat = colour_folder(tmp_path / "train", 4, 0), tmp_path / "train" / "dark"
    options = {"DATASETS__TRAIN": (str(train),), "DATASETS__TEST": (str(flat),)}
    with pytest.raises(ValueError, match="images without a class label"):
        PretrainTrainer.effective_config(tiny_pretrain_config(tmp_path / "out", **options), 1)


def test_unlabelled_images_are_refused_by_name(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((40, 40, 3), np.uint8))
    cfg = tiny_pretrain_config(DATASETS__TRAIN=(str(tmp_path),), DATASETS__TEST=(str(tmp_path),))
    with pytest.raises(ValueError, match="images without a class label"):
        PretrainTrainer.eval_only(cfg)


def test_bank_of_other_classes_is_refused(tmp_path):
    test, bank = (colour_folder(tmp_path / name, 2, 0) for name in ("test", "bank"))
    (bank / "dark").rename(bank / "night")
    cfg = tiny_pretrain_config(
        DATASETS__TRAIN=(str(bank),), DATASETS__TEST=(str(test),), TEST__KNN__BANK=str(bank)
    )
    with pytest.raises(ValueError, match=r"1 class\(es\) that TEST.KNN.BANK does not have \(dark"):
        PretrainTrainer.eval_only(cfg)


def test_classes_of_a_bank_and_a_test_set_are_matched_by_name(tmp_path):
    """The bank has a class more, which moves the numbers of the others."""
    test, bank = (colour_folder(tmp_path / name, 4, 4) for name in ("test", "bank"))
    (bank / "a_third").mkdir()
    for i in range(4):
        cv2.imwrite(str(bank / "a_third" / f"{i}.png"), np.full((40, 40, 3), (0, 0, 255), np.uint8))
    options = {"DATASETS__TEST": (str(test),), "TEST__KNN__BANK": str(bank), "TEST__KNN__K": 3}
    cfg = tiny_pretrain_config(tmp_path / "out", DATASETS__TRAIN=(str(bank),), **options)
    assert PretrainTrainer.eval_only(cfg)["knn"]["top1"] == 100.0
