"""Tests of common/similarity.py: clusters, the automatic threshold, and clusters in rewards and advantages."""

import importlib.util
import itertools
import json
import math
import sys

import pytest
import torch
from conftest import SCRIPTS

from common import similarity
from common.advantages import group_advantages
from common.embedder import Embedder
from common.similarity import (
    Threshold,
    cluster,
    cluster_by_silhouette,
    cluster_groups,
    cluster_stats,
    cosines,
    dra,
    group_rewards,
    reweight,
    within,
)

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ngrams() -> Embedder:
    return Embedder("ngrams", ["cpu"])


def row(*values, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def at_angles(*degrees) -> torch.Tensor:
    """Unit vectors in the plane."""
    radians = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], -1).float()


def partition(labels, names=None) -> set[frozenset]:
    """Clusters as sets of names of rows."""
    labels = labels.tolist()
    names = range(len(labels)) if names is None else names
    together = {}
    for name, label in zip(names, labels, strict=True):
        together.setdefault(label, set()).add(name)
    return {frozenset(members) for members in together.values()}


# --- cosines ---


def test_cosines_by_hand():
    found = cosines(torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [-2.0, 0.0]]))
    expected = [[1, 0.6, 0, 0, -0.6], [0.6, 1, 0, 0, -1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [-0.6, -1, 0, 0, 1]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(found.diagonal(), torch.ones(5)) and torch.equal(found, found.T)


def test_cosines_of_groups_are_those_of_each():
    vectors = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cosines(vectors), torch.stack([cosines(group) for group in vectors]))
    assert cosines(vectors[:0]).shape == (0, 4, 4) and cosines(vectors[0, :0]).shape == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_cosines_follow_the_order_of_the_rows_bit_for_bit(seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(7, 33, generator=generator)
    vectors[5] = vectors[2]
    order = torch.randperm(7, generator=generator)
    assert torch.equal(cosines(vectors[order]), cosines(vectors)[order][:, order])


@pytest.mark.parametrize("function", [cosines, lambda e: cluster(e, 0.5), cluster_by_silhouette])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_embeddings_that_are_not_finite_are_refused(function, bad):
    with pytest.raises(FloatingPointError, match="row 1 is not finite"):
        function(torch.tensor([[1.0, 0.0], [bad, 0.0], [0.0, 1.0]]))


# --- clusters ---


@pytest.mark.parametrize(
    ("vectors", "threshold", "expected"),
    [
        (torch.zeros(0, 2), 0.5, []),
        (at_angles(5), 0.5, [0]),
        (torch.zeros(1, 2), 0.5, [0]),
        (at_angles(0, 10), 0.9, [0, 0]),
        (at_angles(0, 90), 0.9, [0, 1]),
        (torch.zeros(2, 2), 0.9, [0, 1]),
        (at_angles(7, 7, 7, 7), 1.0, [0, 0, 0, 0]),
        (torch.eye(4), 0.1, [0, 1, 2, 3]),
        (torch.eye(4), 0.0, [0, 0, 0, 0]),
        (at_angles(90, 0, 91, 1), 0.9, [0, 1, 0, 1]),
        (at_angles(90, 0, 91, 180, 1), 0.9, [0, 1, 0, 2, 1]),  # numbered as they appear
    ],
)
def test_clusters_by_hand(vectors, threshold, expected):
    labels = cluster(vectors, threshold)
    assert labels.dtype == torch.int64 and labels.tolist() == expected


def test_empty_responses_are_alone(ngrams):
    vectors = ngrams(["", "", "a", "a"], 4)[0]
    assert cluster(vectors, 0.9).tolist() == [0, 1, 2, 2]
    assert cluster(vectors, -3.0).tolist() == [0, 1, 2, 2]


def test_a_chain_is_not_one_cluster():
    # neighbours are 20 degrees apart, the ends 40: single linkage at cos(25) would make one of the three
    assert cluster(at_angles(0, 20, 40), math.cos(math.radians(25))).max() == 1
    assert cluster(at_angles(0, 20, 40), math.cos(math.radians(41))).max() == 0


def test_thresholds_beyond_the_cosines():
    vectors = torch.cat([at_angles(0, 0, 180, 90), torch.zeros(1, 2)])
    assert cluster(vectors, 1.01).tolist() == [0, 1, 2, 3, 4]  # equal responses too
    assert cluster(vectors, 1.0).tolist() == [0, 0, 1, 2, 3]
    for threshold in (-1.0, -1.5, -9.0):
        assert cluster(vectors, threshold).tolist() == [0, 0, 0, 0, 1]


def test_a_cosine_at_the_threshold_is_enough():
    vectors = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    assert cluster(vectors, 0.6).tolist() == [0, 0]
    assert cluster(vectors, 0.600001).tolist() == [0, 1]
    assert cluster(vectors, 0.599999).tolist() == [0, 0]
    for degrees in range(180):  # fp32 embeddings: half of the cosines are rounded down
        assert cluster(at_angles(0, degrees), math.cos(math.radians(degrees))).tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_clusters_are_complete_and_cannot_be_joined(seed):
    generator = torch.Generator().manual_seed(seed)
    vectors, threshold = torch.randn(12, 3, generator=generator), 0.2 + 0.03 * seed
    found, labels = cosines(vectors), cluster(vectors, threshold)
    clusters = [labels == label for label in labels.unique()]
    for one, other in itertools.combinations(clusters, 2):
        assert found[one][:, other].min() < threshold
    assert all(found[one][:, one].min() >= threshold - 1e-6 for one in clusters)


TIES = {
    "polygon": at_angles(0, 60, 120, 180),
    "square": at_angles(0, 90, 180, 270),
    "equal": at_angles(0, 0, 45, 90),
    "grid": torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1]]),
    "empty": torch.tensor([[0.0, 0], [1, 0], [-0.0, 0], [-1, 1]]),
    "opposite": torch.tensor([[0.0, 0], [1, 0], [0, 0], [-1, 0]]),
}
CLUSTERINGS = {
    "0.5": lambda vectors: cluster(vectors, 0.5),
    "0.7": lambda vectors: cluster(vectors, 0.7),
    "0": lambda vectors: cluster(vectors, 0.0),
    "silhouette": lambda vectors: cluster_by_silhouette(vectors, min_silhouette=-1.0),
}


@pytest.mark.parametrize("clustering", CLUSTERINGS)
@pytest.mark.parametrize("name", TIES)
def test_clusters_follow_the_order_of_four_rows_with_ties(name, clustering):
    function, vectors = CLUSTERINGS[clustering], TIES[name]
    expected = partition(function(vectors))
    for order in itertools.permutations(range(4)):
        assert partition(function(vectors[list(order)]), order) == expected


@pytest.mark.parametrize("clustering", CLUSTERINGS)
@pytest.mark.parametrize("seed", range(8))
def test_clusters_follow_the_order_of_eight_rows(seed, clustering):
    function, generator = CLUSTERINGS[clustering], torch.Generator().manual_seed(seed)
    if seed % 2:
        vectors = torch.randint(-1, 2, (8, 3), generator=generator).float()  # many ties, equal and zero rows
    else:
        vectors = torch.randn(8, 33, generator=generator)
    expected = partition(function(vectors))
    for _ in range(4):
        order = torch.randperm(8, generator=generator)
        assert partition(function(vectors[order]), order.tolist()) == expected


def test_methods_follow_the_order_of_the_rows():
    generator = torch.Generator().manual_seed(0)
    rewards, vectors = row(1, 0.5, NAN, -1, 1, 0, 1, 2), torch.randn(1, 8, 3, generator=generator)
    vectors[0, 4] = vectors[0, 0]
    rewards_of = {
        "group_rewards": lambda r, v: group_rewards(r, cluster_groups(v, r, 0.3), 0.7),
        "reweight": lambda r, v: reweight(group_advantages(r, "group"), cluster_groups(v, r, 0.3), 0.7),
        "dra": lambda r, v: dra(r, cosines(v)),
        "within": lambda r, v: within(r, cluster(v[0], 0.3)[None], 1.5, "group"),
        "silhouette": lambda r, v: within(r, cluster_by_silhouette(v[0])[None], 1.5, "zero"),
    }
    for _ in range(10):
        order = torch.randperm(8, generator=generator)
        for name, method in rewards_of.items():
            permuted, expected = method(rewards[:, order], vectors[:, order]), method(rewards, vectors)[:, order]
            torch.testing.assert_close(permuted, expected, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_silhouette_by_hand():
    # distances 1 - cos: 0.015192 within a pair; from 0 deg to the other pair (1 + 1.173648) / 2, from 10 deg
    # (1 + 0.826352) / 2: silhouettes 0.986021 and 0.983363, mean 0.984692
    vectors = at_angles(0, 100, 10, 90)
    assert cluster_by_silhouette(vectors).tolist() == [0, 1, 0, 1]
    assert cluster_by_silhouette(vectors, min_silhouette=0.98469).tolist() == [0, 1, 0, 1]
    assert cluster_by_silhouette(vectors, min_silhouette=0.98470).tolist() == [0, 0, 0, 0]


def test_silhouette_cuts_average_linkage():
    # 50 and 60 deg join, then 30; from there, 0 deg is (0.134 + 0.357 + 0.5) / 3 = 0.330 away on average, and 90 deg
    # (0.5 + 0.234 + 0.134) / 3 = 0.289. By the farthest pair 0 and 30 would join, by the nearest 0 and the three
    vectors = at_angles(0, 30, 50, 60, 90)
    assert cluster_by_silhouette(vectors, max_clusters=2, min_silhouette=-1.0).tolist() == [0, 1, 1, 1, 1]


def test_silhouette_picks_the_number_of_clusters_up_to_the_largest():
    vectors = at_angles(0, 2, 80, 82, 160, 162, 240, 242)
    assert cluster_by_silhouette(vectors).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cluster_by_silhouette(vectors, max_clusters=3).max() <= 2
    assert cluster_by_silhouette(vectors, max_clusters=1).max() == 0


@pytest.mark.parametrize(
    "vectors",
    [torch.zeros(0, 2), at_angles(5), at_angles(0, 90), torch.zeros(4, 2), at_angles(7, 7, 7, 7), torch.eye(4),
     at_angles(7, 7, 7, 7) * torch.tensor([[1.0], [1 / 3], [3.3], [0.7]])],
)  # fmt: skip
def test_silhouette_without_structure_gives_one_cluster(vectors):
    labels = cluster_by_silhouette(vectors)
    assert labels.dtype == torch.int64 and labels.tolist() == [0] * len(vectors)


def test_silhouette_takes_empty_responses_as_alike():
    vectors = torch.cat([torch.tensor([[0.0, 0.0], [-0.0, 0.0]]), at_angles(0, 1)])
    assert cluster_by_silhouette(vectors).tolist() == [0, 0, 1, 1]


def test_only_positive_responses_are_in_groups():
    vectors = torch.stack([at_angles(0, 1, 90, 0), at_angles(90, 0, 1, 2), at_angles(0, 1, 2, 3)])
    rewards = torch.tensor([[1, 0.5, 1, -1], [1, NAN, 2, 1], [0, 0, -1, NAN]])
    assert cluster_groups(vectors, rewards, 0.9).tolist() == [[0, 0, 1, -1], [0, -1, 1, 1], [-1] * 4]


# --- what is logged ---


def test_stats_by_hand():
    labels = torch.tensor([[0, 0, 1, -1], [-1, -1, -1, -1], [0, 1, 2, 3]])
    values = torch.zeros(3, 4, 4)
    values[0] = torch.tensor([[1, 0.6, 0, 0], [0.6, 1, 0, 0], [0, 0, 1, 0.3], [0, 0, 0.3, 1]])
    values[1], values[2] = 1.0, torch.eye(4)
    found = cluster_stats(labels, values)
    # shares 2/3 and 1/3: exp(entropy) = exp(0.636514) = 1.889882; pairs (0.6 + 0.3) / 6 = 0.15
    expected = {"clusters": (2 + 0 + 4) / 3, "singletons": (1 / 3 + 1) / 2, "effective_clusters": (1.889882 + 4) / 2,
                "cosine": (0.15 + 1 + 0) / 3}  # fmt: skip
    assert found == pytest.approx(expected, abs=1e-6)
    assert all(type(value) is float for value in found.values())


def test_stats_with_nothing_to_average_are_nan():
    found = cluster_stats(torch.tensor([[-1]]), torch.ones(1, 1, 1))
    assert found.pop("clusters") == 0 and all(math.isnan(value) for value in found.values())


def test_stats_of_many_sizes_count_whole_clusters():
    for group in range(1, 20):
        assert cluster_stats(torch.zeros(1, group, dtype=torch.int64), torch.ones(1, group, group))["clusters"] == 1


# --- threshold ---


def batch_of(*pairs) -> torch.Tensor:
    """[1, 3, 3] with these three cosines."""
    found = torch.eye(3)
    i, j = torch.triu_indices(3, 3, 1)
    found[i, j] = found[j, i] = torch.tensor(pairs)
    return found[None]


def test_a_fixed_threshold_is_itself():
    threshold = Threshold(0.85)
    assert threshold(batch_of(0.1, 0.2, 0.3)) == 0.85 and threshold.quantiles == []
    assert Threshold(2)(batch_of(0.1, 0.2, 0.3)) == 2.0


def test_an_automatic_threshold_by_hand():
    # place 0.7 x 2 = 1.4 among the sorted three: 0.2 + 0.4 x (0.9 - 0.2) = 0.48
    threshold = Threshold("auto")
    assert threshold(batch_of(0.9, 0.1, 0.2)) == pytest.approx(0.48)
    assert threshold(batch_of(0.5, 0.5, 0.5)) == pytest.approx((0.48 + 0.5) / 2)
    # both prompts at once: place 0.7 x 5 = 3.5 of 0.1 0.1 0.2 0.2 0.9 0.9
    both = Threshold("auto")(batch_of(0.9, 0.1, 0.2).repeat(2, 1, 1))
    assert both == pytest.approx(0.55)


def test_an_automatic_threshold_stays_after_five_batches_and_survives_a_checkpoint():
    batches = [batch_of(value, value, value) for value in (0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.9)]
    whole = Threshold("auto")
    values = [whole(batch) for batch in batches]
    assert values == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3, 0.3])
    for cut in range(8):
        first = Threshold("auto")
        begun = [first(batch) for batch in batches[:cut]]
        state = json.loads(json.dumps(first.quantiles))
        second = Threshold("auto", state)
        assert begun + [second(batch) for batch in batches[cut:]] == values
    assert len(whole.quantiles) == similarity.NUM_CALIBRATION == 5


def test_thresholds_that_cannot_be_are_refused():
    assert Threshold("0.9").tau == 0.9
    for tau in ("high", "nan", NAN, INF):
        with pytest.raises(ValueError, match=r"similarity_threshold.*'auto'"):
            Threshold(tau)
    with pytest.raises(ValueError, match=r"threshold = nan: must be a cosine"):
        cluster(torch.eye(2), NAN)


def test_an_automatic_threshold_without_pairs_stays_what_it_was():
    threshold = Threshold("auto")
    for nothing in (torch.ones(4, 1, 1), torch.ones(0, 4, 4), torch.ones(0, 1, 1)):
        assert threshold(nothing) == 1.0 and threshold.quantiles == []
    assert threshold(batch_of(0.9, 0.1, 0.2)) == threshold(torch.ones(4, 1, 1)) == pytest.approx(0.48)
    assert len(threshold.quantiles) == 1


def test_warnings_are_said_once(capsys):
    rewards, alone, one = torch.ones(3, 3), torch.tensor([[0, 1, 2]] * 3), torch.zeros(3, 3, dtype=torch.int64)
    threshold = Threshold(0.9)
    threshold.warn(alone, rewards)
    said = "warning: the median group has as many clusters as positive responses: this is plain GRPO; lower "
    assert capsys.readouterr().out == said + "similarity_threshold\n"
    threshold.warn(one, rewards)
    said = "warning: the median group has 1 cluster: a per-prompt factor only; raise similarity_threshold\n"
    assert capsys.readouterr().out == said
    threshold.warn(alone, rewards)
    threshold.warn(one, rewards)
    assert capsys.readouterr().out == ""


def test_warnings_are_about_the_median_group_with_two_positives(capsys):
    labels = torch.tensor([[0, 0, 1], [0, 1, -1], [0, 0, 1], [0, -1, -1], [-1, -1, -1]])
    rewards = torch.where(labels >= 0, 1.0, -1.0)
    Threshold(0.9).warn(labels, rewards)  # shares 2/3, 1 and 2/3; the groups with one cluster do not count
    Threshold(0.9).warn(labels[3:], rewards[3:])
    Threshold(0.9).warn(labels[:0], rewards[:0])
    assert capsys.readouterr().out == ""
    Threshold(0.9).warn(labels[1:2], rewards[1:2])
    assert "as many clusters" in capsys.readouterr().out
    for group in range(2, 20):  # 1 / group, added up in fp32, is not always 1
        Threshold(0.9).warn(torch.zeros(1, group, dtype=torch.int64), torch.ones(1, group))
    assert capsys.readouterr().out.count("has 1 cluster") == 18
    # clusters are counted among the positive: here one, though there are three labels
    Threshold(0.9).warn(torch.tensor([[0, 0, 1, 2]]), row(1, 1, 0, NAN))
    assert "has 1 cluster" in capsys.readouterr().out


# --- rewards ---


def test_group_rewards_by_hand():
    # label 0 has 3 members of which 2 are positive; each row for itself
    rewards, labels = row(1, 2, -1, 3, NAN, 0), row(0, 0, 0, 1, 1, 1, dtype=torch.int64)
    torch.testing.assert_close(
        group_rewards(rewards, labels, 0.5), row(1 / math.sqrt(2), 2 / math.sqrt(2), -1, 3, NAN, 0), equal_nan=True
    )
    torch.testing.assert_close(group_rewards(rewards, labels, 1.0)[0, :4], torch.tensor([0.5, 1, -1, 3]))
    one = group_rewards(rewards[0], labels[0], 0.5)
    both = group_rewards(rewards.repeat(2, 1), labels.repeat(2, 1), 0.5)
    assert torch.equal(both.nan_to_num(), one.nan_to_num().repeat(2, 1))


def test_rows_in_no_cluster_are_not_a_cluster():
    assert torch.equal(group_rewards(row(1, 1, 1, 1), row(-1, -1, 0, 0), 1.0), row(1, 1, 0.5, 0.5))


def test_group_rewards_leaves_what_is_not_positive():
    rewards, labels = row(-1, -2, 0, NAN), torch.zeros(1, 4, dtype=torch.int64)
    assert torch.equal(group_rewards(rewards, labels, 1.0).nan_to_num(nan=9), rewards.nan_to_num(nan=9))
    assert group_rewards(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 1.0).shape == (0,)


@pytest.mark.parametrize("seed", range(5))
def test_alpha_zero_changes_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    values, labels = torch.randn(4, 8, generator=generator), torch.randint(-1, 3, (4, 8), generator=generator)
    assert torch.equal(group_rewards(values, labels, 0.0), values)
    assert torch.equal(reweight(values, labels, 0.0), values)


def test_labels_of_another_shape_are_refused():
    for method in (group_rewards, reweight):
        with pytest.raises(ValueError, match=r"\[4\].*\[2, 4\].*one label each"):
            method(torch.ones(2, 4), torch.zeros(4, dtype=torch.int64), 1.0)


def test_dra_by_hand():
    found = torch.eye(4)
    for i, j, value in [(0, 1, 0.5), (0, 2, -0.3), (0, 3, 0.25), (1, 2, 1.0), (2, 3, 0.4)]:
        found[i, j] = found[j, i] = value
    expected = row(1 / 1.75, 2 / 2.5, -1, NAN)
    torch.testing.assert_close(dra(row(1, 2, -1, NAN), found[None]), expected, equal_nan=True)


def test_dra_without_likeness_changes_nothing():
    rewards = torch.rand(2, 4, generator=torch.Generator().manual_seed(0)) - 0.2
    found = torch.eye(4).where(torch.eye(4) == 1, -0.5).repeat(2, 1, 1)
    assert torch.equal(dra(rewards, found), rewards)
    assert torch.equal(dra(rewards, torch.eye(4).repeat(2, 1, 1)), rewards)
    assert torch.equal(dra(row(1, 1, 1, 1), torch.ones(1, 4, 4)), row(0.25, 0.25, 0.25, 0.25))


# --- advantages ---


def test_reweight_by_hand():
    # size^-1 A = 0.5 0.5 2, Z = 4 / 3
    found = reweight(row(1, 1, 2, -3, -1), row(0, 0, 1, 0, 2), 1.0)
    torch.testing.assert_close(found, row(2 / 3, 2 / 3, 8 / 3, -3, -1))


@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.0])
def test_reweight_keeps_the_sum_and_clusters_of_one(alpha):
    generator = torch.Generator().manual_seed(0)
    advantages = group_advantages(torch.rand(6, 8, generator=generator), "group")
    labels = torch.randint(0, 3, (6, 8), generator=generator)
    found = reweight(advantages, labels, alpha)
    assert (found - advantages).abs().max() > 0.01
    torch.testing.assert_close(found.sum(-1), torch.zeros(6), rtol=0, atol=2e-6)
    assert torch.equal(found[advantages <= 0], advantages[advantages <= 0])
    assert torch.equal(reweight(advantages, torch.arange(8).repeat(6, 1), alpha), advantages)
    assert torch.equal(reweight(-advantages.abs(), labels, alpha), -advantages.abs())
    assert torch.equal(reweight(torch.zeros(1, 8), labels[:1], alpha), torch.zeros(1, 8))


def test_within_by_hand():
    # plain: mean 0.75, std 0.5: 0.4999, -1.4997. In the clusters: +-0.7070, and 0 for equal rewards. m = 2
    rewards, labels = row(1, 0, 1, 1), row(0, 0, 1, 1, dtype=torch.int64)
    plain, inside = row(0.4999, -1.4997, 0.4999, 0.4999), row(0.7070, -0.7070, 0, 0)
    torch.testing.assert_close(within(rewards, labels, 0.0, "zero"), inside, rtol=0, atol=1e-4)
    torch.testing.assert_close(within(rewards, labels, 2.0, "zero"), (plain + inside) / 2, rtol=0, atol=1e-4)
    torch.testing.assert_close(within(rewards, labels, 6.0, "zero"), 0.75 * plain + 0.25 * inside, rtol=0, atol=1e-4)


def test_within_with_singletons():
    # the cluster of the last two has one scored member
    rewards, labels = row(1, 0, 3, NAN), row(0, 0, 1, 1, dtype=torch.int64)
    plain = group_advantages(rewards, "group")
    for kappa in (0.0, 1.0):
        group, zero = within(rewards, labels, kappa, "group"), within(rewards, labels, kappa, "zero")
        assert group[0, 2] == plain[0, 2] and group[0, 3] == zero[0, 3] == 0
        torch.testing.assert_close(zero[0, 2], plain[0, 2] * kappa / (1 + kappa))
        assert torch.equal(group[0, :2], zero[0, :2])


@pytest.mark.parametrize("singletons", ["zero", "group"])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 3.0, 1e6, INF])
def test_within_one_cluster_is_plain_grpo(kappa, singletons):
    rewards = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))
    rewards[0, :3], rewards[1], rewards[2, 1:] = NAN, NAN, NAN
    plain, one = group_advantages(rewards, "group"), torch.zeros(6, 8, dtype=torch.int64)
    assert torch.equal(within(rewards, one, kappa, singletons), plain)
    assert torch.equal(within(rewards, one - 1, kappa, singletons), plain)
    labels = torch.randint(0, 3, (6, 8), generator=torch.Generator().manual_seed(1))
    assert torch.equal(within(rewards, labels, INF, singletons), plain)
    found = within(rewards, labels, kappa, singletons)
    assert not found[rewards.isnan()].any() and found.isfinite().all()


def test_within_does_not_mix_prompts():
    rewards, labels = torch.tensor([[1.0, 0, 2, 0], [5, 9, 7, 7]]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    found = within(rewards, labels, 1.0, "zero")
    assert torch.equal(found[1:], within(rewards[1:], labels[1:], 1.0, "zero"))


# --- the whole way, as the script goes it ---


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("similarity_grpo_script", SCRIPTS["similarity_grpo"])
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("method", ["discount", "advantage", "dra", "within"])
def test_groups_with_nothing_to_compare_have_advantage_zero(method, script, ngrams):
    for tau, (texts, values) in itertools.product(("auto", "1", "0", "-1"), [
        (["a"], [1.0]), (["a"] * 4, [1.0] * 4), (["a"] * 4, [NAN] * 4), (["", " ", "\n", "\t"], [1.0] * 4),
        (["1", "2", "3", "4"], [NAN, 1.0, NAN, NAN]), (["1", "2", "3", "4"], [0.0] * 4),
    ]):  # fmt: skip
        cfg = script.Config(similarity_method=method, similarity_threshold=tau)
        arguments = row(*values), ngrams(texts, len(texts)), Threshold(tau), cfg
        found, stats = script.similarity_advantages(*arguments)
        assert torch.equal(found, torch.zeros(1, len(texts))), (tau, texts, values)
        assert not math.isnan(stats["clusters"])


def test_empty_responses_are_groups_of_their_own_and_never_nan(script):
    texts = ["", " \n", "a", "a", "\U0001f389", "\U0001f389", "\u200b", "b"]
    vectors = Embedder("ngrams", ["cpu"])(texts, 8)
    cfg = script.Config(similarity_threshold="0.9")
    found, stats = script.similarity_advantages(torch.ones(1, 8), vectors, Threshold(0.9), cfg)
    pair = 2**-0.5  # the two "a" and the two of the emoji; all others are alone
    shaped = row(1.0, 1.0, pair, pair, pair, pair, 1.0, 1.0)
    torch.testing.assert_close(found, group_advantages(shaped, "batch"))
    assert stats["clusters"] == 6 and stats["singletons"] == 0.5
    orthogonal = script.similarity_advantages(torch.ones(1, 4), torch.eye(4)[None], Threshold(0.9), cfg)
    assert not orthogonal[0].any() and orthogonal[1]["clusters"] == 4


def test_within_refuses_other_values():
    labels = torch.zeros(1, 2, dtype=torch.int64)
    for kappa, singletons in [(-1.0, "zero"), (NAN, "zero"), (1.0, "drop")]:
        with pytest.raises(ValueError, match=f"kappa = {kappa}, singletons = '{singletons}'.*zero, group"):
            within(row(1, 0), labels, kappa, singletons)
