"""Tests of common/tasks/similarity.py: clusters, the automatic threshold, and the first four rules of diversity.py."""

import itertools
import json
import math

import pytest
import torch
from bounds import assert_rounded, rounding
from conftest import SCRIPTS, load_script

from common.loop import similar
from common.maths.advantages import group_advantages
from common.tasks import similarity
from common.tasks.embedder import Embedder
from common.tasks.similarity import Threshold, cluster, cluster_by_silhouette, cosines, group_rewards, reweight, within

NAN, INF = math.nan, math.inf
script = load_script(SCRIPTS["similarity_grpo"])
NGRAMS = Embedder("ngrams", ["cpu"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def row(*values, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def at_angles(*degrees) -> torch.Tensor:
    """Unit vectors in the plane."""
    radians = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], -1).float()


def partition(labels, names=None) -> set[frozenset]:
    """Clusters as sets of names of rows."""
    together = {}
    for name, label in zip(names or range(len(labels)), labels.tolist(), strict=True):
        together.setdefault(label, set()).add(name)
    return {frozenset(members) for members in together.values()}


def test_cosines_by_hand():
    found = cosines(torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [-2.0, 0.0]]))
    expected = [[1, 0.6, 0, 0, -0.6], [0.6, 1, 0, 0, -1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [-0.6, -1, 0, 0, 1]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(found.diagonal(), torch.ones(5)) and torch.equal(found, found.T)


def test_cosines_follow_the_order_of_the_rows_bit_for_bit():
    vectors = torch.randn(4, 7, 33, generator=seeded())
    vectors[0, 5] = vectors[0, 2]
    order = torch.randperm(7, generator=seeded())
    # rows are sorted before anything is computed
    assert torch.equal(cosines(vectors[:, order]), torch.stack([cosines(x)[order][:, order] for x in vectors]))
    assert cosines(vectors[:0]).shape == (0, 7, 7) and cosines(vectors[0, :0]).shape == (0, 0)


@pytest.mark.parametrize("function", [cosines, lambda e: cluster(e, 0.5), cluster_by_silhouette])
def test_embeddings_that_are_not_finite_are_refused(function):
    for bad in (NAN, INF):
        with pytest.raises(FloatingPointError, match="row 1 is not finite"):
            function(torch.tensor([[1.0, 0.0], [bad, 0.0], [0.0, 1.0]]))


MIXED = torch.cat([at_angles(0, 0, 180, 90), torch.zeros(1, 2)])


@pytest.mark.parametrize(("vectors", "threshold", "expected"), [
    (torch.zeros(0, 2), 0.5, []), (at_angles(5), 0.5, [0]), (torch.zeros(2, 2), 0.9, [0, 1]),
    (torch.eye(4), 0.0, [0, 0, 0, 0]), (at_angles(90, 0, 91, 180, 1), 0.9, [0, 1, 0, 2, 1]),
    (MIXED, 1.01, [0, 1, 2, 3, 4]), (MIXED, 1.0, [0, 0, 1, 2, 3]), (MIXED, -1.0, [0, 0, 0, 0, 1]),
    # a chain whose neighbours are about 20 degrees apart and its ends 40: single linkage would make it one cluster
    (at_angles(0, 19, 40), math.cos(math.radians(25)), [0, 0, 1]),
    (at_angles(0, 19, 40), math.cos(math.radians(41)), [0, 0, 0]),
])  # fmt: skip
def test_clusters_by_hand(vectors, threshold, expected):
    labels = cluster(vectors, threshold)
    assert labels.dtype == torch.int64 and labels.tolist() == expected


def test_a_cosine_at_the_threshold_is_enough():
    vectors = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    assert cluster(vectors, 0.6).tolist() == cluster(vectors, 0.6 - 2 * similarity.TOLERANCE).tolist() == [0, 0]
    assert cluster(vectors, 0.6 + 2 * similarity.TOLERANCE).tolist() == [0, 1]
    for degrees in range(180):  # fp32 embeddings: half of the cosines are rounded down
        assert cluster(at_angles(0, degrees), math.cos(math.radians(degrees))).tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_complete_and_cannot_be_joined(seed):
    vectors, threshold = torch.randn(12, 3, generator=seeded(seed)), 0.2 + 0.12 * seed
    found, labels = cosines(vectors), cluster(vectors, threshold)
    clusters = [labels == label for label in labels.unique()]
    for one, other in itertools.combinations(clusters, 2):
        assert found[one][:, other].min() < threshold
    least = threshold - similarity.TOLERANCE - rounding(1)
    assert all(found[one][:, one].min() >= least for one in clusters)


ROWS = {
    "polygon": at_angles(0, 60, 120, 180), "equal": at_angles(0, 0, 45, 90),
    "grid": torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1]]),
    "empty": torch.tensor([[0.0, 0], [1, 0], [-0.0, 0], [-1, 1]]),
    **{f"ties{seed}": torch.randint(-1, 2, (8, 3), generator=seeded(seed)).float() for seed in range(3)},
    "random": torch.randn(8, 33, generator=seeded()),
}  # fmt: skip
CLUSTERINGS = {f"{tau}": lambda vectors, tau=tau: cluster(vectors, tau) for tau in (0.5, 0.7, 0.0)}
CLUSTERINGS["silhouette"] = lambda vectors: cluster_by_silhouette(vectors, min_silhouette=-1.0)


@pytest.mark.parametrize("clustering", CLUSTERINGS)
@pytest.mark.parametrize("name", ROWS)
def test_clusters_follow_the_order_of_the_rows(name, clustering):
    function, vectors, generator = CLUSTERINGS[clustering], ROWS[name], seeded()
    expected = partition(function(vectors))
    orders = [torch.randperm(8, generator=generator).tolist() for _ in range(4)]
    for order in itertools.permutations(range(4)) if len(vectors) == 4 else orders:
        assert partition(function(vectors[list(order)]), order) == expected


def test_silhouette_by_hand():
    pair, other = 1 - math.cos(math.radians(10)), 1 - math.cos(math.radians(80))
    outer, inner = (1 + 1 - math.cos(math.radians(100))) / 2, (1 + other) / 2  # of 0 and 100, and of 10 and 90 degrees
    mean = 1 - pair * (1 / outer + 1 / inner) / 2
    vectors, error = at_angles(0, 100, 10, 90), rounding(8)  # coordinates are fp32: 4 in a distance, 2 distances
    assert cluster_by_silhouette(vectors).tolist() == [0, 1, 0, 1]
    assert cluster_by_silhouette(vectors, min_silhouette=mean - error).tolist() == [0, 1, 0, 1]
    assert cluster_by_silhouette(vectors, min_silhouette=mean + error).tolist() == [0, 0, 0, 0]


PAIRS = at_angles(0, 2, 70, 72, 160, 162, 250, 252)


@pytest.mark.parametrize(("vectors", "options", "expected"), [
    # 50 and 60 deg join, then 30; from there, 0 deg is (0.134 + 0.357 + 0.5) / 3 = 0.330 away on average, and 90 deg
    # (0.5 + 0.234 + 0.134) / 3 = 0.289. By the farthest pair 0 and 30 would join, by the nearest 0 and the three
    (at_angles(0, 30, 50, 60, 90), dict(max_clusters=2, min_silhouette=-1.0), [0, 1, 1, 1, 1]),
    (PAIRS, {}, [0, 0, 1, 1, 2, 2, 3, 3]), (PAIRS, dict(max_clusters=1), [0] * 8),
    (PAIRS, dict(max_clusters=3), [0, 0, 0, 0, 1, 1, 2, 2]),
    (torch.cat([torch.tensor([[0.0, 0.0], [-0.0, 0.0]]), at_angles(0, 1)]), {}, [0, 0, 1, 1]),
    # no structure
    (torch.zeros(0, 2), {}, []), (at_angles(5), {}, [0]), (torch.eye(4), {}, [0] * 4), (torch.zeros(4, 2), {}, [0] * 4),
    (at_angles(7, 7, 7, 7) * torch.tensor([[1.0], [1 / 3], [3.3], [0.7]]), {}, [0] * 4),
])  # fmt: skip
def test_silhouette_picks_the_number_of_clusters(vectors, options, expected):
    labels = cluster_by_silhouette(vectors, **options)
    assert labels.dtype == torch.int64 and labels.tolist() == expected


def test_only_positive_responses_are_in_groups():
    vectors = torch.stack([at_angles(0, 1, 90, 0), at_angles(90, 0, 1, 2), at_angles(0, 1, 2, 3)])
    rewards = torch.tensor([[1, 0.5, 1, -1], [1, NAN, 2, 1], [0, 0, -1, NAN]])
    assert similarity.cluster_groups(vectors, rewards, 0.9).tolist() == [[0, 0, 1, -1], [0, -1, 1, 1], [-1] * 4]
    scored = similarity.cluster_groups(vectors, rewards, 0.9, only_positive=False)
    assert scored.tolist() == [[0, 0, 1, 0], [0, -1, 1, 1], [0, 0, 0, -1]]


def test_stats_by_hand_and_of_nothing():
    labels = torch.tensor([[0, 0, 1, -1], [-1, -1, -1, -1], [0, 1, 2, 3]])
    values = torch.zeros(3, 4, 4)
    values[0] = torch.tensor([[1, 0.6, 0, 0], [0.6, 1, 0, 0], [0, 0, 1, 0.3], [0, 0, 0.3, 1]])
    values[1], values[2] = 1.0, torch.eye(4)
    found = similarity.cluster_stats(labels, values)
    effective = (3 / 2) ** (2 / 3) * 3 ** (1 / 3)  # exp of the entropy of the shares 2/3 and 1/3
    expected = {"clusters": (2 + 0 + 4) / 3, "singletons": (1 / 3 + 1) / 2, "effective_clusters": (effective + 4) / 2,
                "cosine": ((0.6 + 0.3) / 6 + 1 + 0) / 3}  # fmt: skip
    assert found == pytest.approx(expected)
    assert all(type(value) is float for value in found.values())
    found = similarity.cluster_stats(torch.tensor([[-1]]), torch.ones(1, 1, 1))
    assert found.pop("clusters") == 0 and all(math.isnan(value) for value in found.values())
    for group in range(1, 20):  # whole clusters are counted
        assert similarity.cluster_stats(torch.zeros(1, group).long(), torch.ones(1, group, group))["clusters"] == 1


def batch_of(*pairs) -> torch.Tensor:
    """[1, 3, 3] with these three cosines."""
    found = torch.eye(3)
    i, j = torch.triu_indices(3, 3, 1)
    found[i, j] = found[j, i] = torch.tensor(pairs)
    return found[None]


def test_an_automatic_threshold_by_hand():
    # place 0.7 x 2 = 1.4 among the sorted three: 0.2 + 0.4 x (0.9 - 0.2) = 0.48
    threshold = Threshold("auto")
    for nothing in (torch.ones(4, 1, 1), torch.ones(0, 4, 4), torch.ones(0, 1, 1)):  # no pairs
        assert threshold(nothing) == 1.0 and threshold.quantiles == []
    assert threshold(batch_of(0.9, 0.1, 0.2)) == threshold(torch.ones(4, 1, 1)) == pytest.approx(0.48)
    assert threshold(batch_of(0.5, 0.5, 0.5)) == pytest.approx((0.48 + 0.5) / 2)
    # both prompts at once: place 0.7 x 5 = 3.5 of 0.1 0.1 0.2 0.2 0.9 0.9
    assert Threshold("auto")(batch_of(0.9, 0.1, 0.2).repeat(2, 1, 1)) == pytest.approx(0.55)


def test_an_automatic_threshold_stays_after_five_batches_and_survives_a_checkpoint():
    batches = [batch_of(value, value, value) for value in (0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.9)]
    whole = Threshold("auto")
    values = [whole(batch) for batch in batches]
    assert values == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3, 0.3])
    for cut in (0, 3, 5, 7):
        first = Threshold("auto")
        begun = [first(batch) for batch in batches[:cut]]
        second = Threshold("auto", json.loads(json.dumps(first.quantiles)))
        assert begun + [second(batch) for batch in batches[cut:]] == values


def test_a_fixed_threshold_is_itself_or_refused():
    for tau in (0.85, "0.85", 2):
        threshold = Threshold(tau)
        assert threshold(batch_of(0.1, 0.2, 0.3)) == float(tau) and threshold.quantiles == []
    for tau in ("high", "nan", INF):
        with pytest.raises(ValueError, match=r"similarity_threshold.*'auto'"):
            Threshold(tau)
    with pytest.raises(ValueError, match=r"threshold = nan: must be a cosine"):
        cluster(torch.eye(2), NAN)


ALONE, ONE = "as many clusters as positive responses", "has 1 cluster"


def test_warnings_are_said_once(capsys):
    rewards, threshold = torch.ones(3, 3), Threshold(0.9)
    for _ in range(2):
        threshold.warn(torch.arange(3).repeat(3, 1), rewards)
        threshold.warn(torch.zeros(3, 3).long(), rewards)
    first, second = capsys.readouterr().out.splitlines()
    assert ALONE in first and "lower similarity_threshold" in first
    assert ONE in second and "raise similarity_threshold" in second


def test_warnings_are_about_the_median_group_with_two_positives(capsys):
    def said(labels, rewards=None) -> str:
        Threshold(0.9).warn(labels, torch.where(labels >= 0, 1.0, -1.0) if rewards is None else rewards)
        return capsys.readouterr().out

    labels = torch.tensor([[0, 0, 1], [0, 1, -1], [0, 0, 1], [0, -1, -1], [-1, -1, -1]])
    # shares 2/3, 1 and 2/3; the groups with one cluster do not count
    assert said(labels) == said(labels[3:]) == said(labels[:0]) == ""
    assert ALONE in said(labels[1:2])
    for group in range(2, 20):  # 1 / group, added up in fp32, is not always 1
        assert ONE in said(torch.zeros(1, group, dtype=torch.int64))
    # clusters are counted among the positive: here one, though there are three labels
    assert ONE in said(torch.tensor([[0, 0, 1, 2]]), row(1, 1, 0, NAN))


@pytest.mark.parametrize(("rewards", "labels", "alpha", "expected"), [
    # label 0 has 3 members of which 2 are positive
    ((1, 2, -1, 3, NAN, 0), (0, 0, 0, 1, 1, 1), 0.5, (2**-0.5, 2**0.5, -1, 3, NAN, 0)),
    ((1, 1, 1, 1), (-1, -1, 0, 0), 1.0, (1, 1, 0.5, 0.5)), ((), (), 1.0, ()),
])  # fmt: skip
def test_group_rewards_by_hand(rewards, labels, alpha, expected):
    rewards, labels, expected = row(*rewards), row(*labels, dtype=torch.int64), row(*expected)
    for copies in (1, 2):  # each row for itself
        found = group_rewards(rewards.repeat(copies, 1), labels.repeat(copies, 1), alpha)
        torch.testing.assert_close(found, expected.repeat(copies, 1), equal_nan=True)
    torch.testing.assert_close(group_rewards(rewards[0], labels[0], alpha), expected[0], equal_nan=True)


def test_dra_by_hand():
    found = torch.eye(4)
    for i, j, value in [(0, 1, 0.5), (0, 2, -0.3), (0, 3, 0.25), (1, 2, 1.0), (2, 3, 0.4)]:
        found[i, j] = found[j, i] = value
    rewards, expected = row(1, 2, -1, NAN), row(1 / 1.75, 2 / 2.5, -1, NAN)
    torch.testing.assert_close(similarity.dra(rewards, found[None]), expected, equal_nan=True)
    assert torch.equal(similarity.dra(row(1, 1, 1, 1), torch.ones(1, 4, 4)), row(0.25, 0.25, 0.25, 0.25))
    unlike = torch.eye(4)[None]
    torch.testing.assert_close(similarity.dra(rewards, unlike), rewards, rtol=0, atol=0, equal_nan=True)


def test_reweight_keeps_the_sum_and_clusters_of_one():
    # by hand: size^-1 A = 0.5 0.5 2, Z = 4 / 3
    found = reweight(row(1, 1, 2, -3, -1), row(0, 0, 1, 0, 2), 1.0)
    torch.testing.assert_close(found, row(2 / 3, 2 / 3, 8 / 3, -3, -1))
    generator = seeded()
    advantages = group_advantages(torch.rand(6, 8, generator=generator), "group")
    labels = torch.randint(0, 3, (6, 8), generator=generator)
    for alpha in (0.3, 2.0):
        found = reweight(advantages, labels, alpha)
        assert (found - advantages).abs().max() > 0.01
        # three sums of 8, and a power, a quotient and two products; partial sums are at most the sum of the positive
        largest = found.clamp(min=0).sum(-1).max().item()
        assert_rounded(found.sum(-1), advantages.sum(-1), terms=3 * 8 + 4 + 3, magnitude=largest)
        assert torch.equal(found[advantages <= 0], advantages[advantages <= 0])
        assert torch.equal(reweight(advantages, torch.arange(8).repeat(6, 1), alpha), advantages)
        assert torch.equal(reweight(-advantages.abs(), labels, alpha), -advantages.abs())
    for method in (reweight, group_rewards):  # size^0 is 1, and in a sum divided by itself
        assert torch.equal(method(advantages, labels, 0.0), advantages)


def test_within_by_hand():
    # plain: mean 0.75, std 0.5; in the clusters: std sqrt(1 / 2), and 0 for equal rewards; 1e-4 is added. m = 2
    rewards, labels = row(1, 0, 1, 1), row(0, 0, 1, 1, dtype=torch.int64)
    rewards, labels = torch.cat([rewards, row(5, 9, 7, 7)]), torch.cat([labels, 1 - labels])  # prompts do not mix
    plain, inside = row(0.25, -0.75, 0.25, 0.25) / 0.5001, row(0.5, -0.5, 0, 0) / (0.5**0.5 + 1e-4)
    for kappa, share in ((0.0, 1.0), (2.0, 0.5), (6.0, 0.25)):
        expected = share * inside + (1 - share) * plain
        torch.testing.assert_close(within(rewards, labels, kappa, "zero")[:1], expected)
    # singletons: the cluster of the last two has one scored member
    rewards, labels = row(1, 0, 3, NAN), row(0, 0, 1, 1, dtype=torch.int64)
    plain = group_advantages(rewards, "group")
    for kappa in (0.0, 1.0):
        group, zero = within(rewards, labels, kappa, "group"), within(rewards, labels, kappa, "zero")
        assert group[0, 2] == plain[0, 2] and group[0, 3] == zero[0, 3] == 0
        torch.testing.assert_close(zero[0, 2], plain[0, 2] * kappa / (1 + kappa))
        assert torch.equal(group[0, :2], zero[0, :2])


@pytest.mark.parametrize("singletons", ["zero", "group"])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 1e6, INF])
def test_within_one_cluster_is_plain_grpo(kappa, singletons):
    rewards = torch.rand(6, 8, generator=seeded())
    rewards[0, :3], rewards[1], rewards[2, 1:] = NAN, NAN, NAN
    plain, one = group_advantages(rewards, "group"), torch.zeros(6, 8, dtype=torch.int64)
    # a mean of two equal numbers, or with a weight of 0, is exact
    assert torch.equal(within(rewards, one, kappa, singletons), plain)
    assert torch.equal(within(rewards, one - 1, kappa, singletons), plain)
    labels = torch.randint(0, 3, (6, 8), generator=seeded(1))
    assert torch.equal(within(rewards, labels, INF, singletons), plain)
    found = within(rewards, labels, kappa, singletons)
    assert not found[rewards.isnan()].any() and found.isfinite().all()


def test_labels_and_options_that_cannot_be_are_refused():
    for method in (group_rewards, reweight):
        with pytest.raises(ValueError, match=r"\[4\].*\[2, 4\].*one label each"):
            method(torch.ones(2, 4), torch.zeros(4).long(), 1.0)
    for kappa, singletons in [(-1.0, "zero"), (NAN, "zero"), (1.0, "drop")]:
        with pytest.raises(ValueError, match=f"kappa = {kappa}, singletons = '{singletons}'.*zero, group"):
            within(row(1, 0), torch.zeros(1, 2).long(), kappa, singletons)


@pytest.mark.parametrize("method", ["discount", "advantage", "dra", "within", "darling", "uarl", "balanced", "mmr"])
def test_groups_with_nothing_to_compare_have_advantage_zero(method):
    for texts, values in [
        (["a"], [1.0]), (["a"] * 4, [1.0] * 4), (["a"] * 4, [NAN] * 4), (["", " ", "\n", "\t"], [1.0] * 4),
        (["1", "2", "3", "4"], [NAN, 1.0, NAN, NAN]), (["1", "2", "3", "4"], [0.0] * 4),
    ]:  # fmt: skip
        vectors = NGRAMS(texts, len(texts))
        for tau in ("auto", "1", "0", "-1"):
            cfg = script.Config(similarity_method=method, similarity_threshold=tau)
            clusters = similar.cluster(cfg, row(*values), vectors, Threshold(tau))
            found = script.similarity_advantages(*clusters, cfg)
            assert torch.equal(found, torch.zeros(1, len(texts))), (tau, texts, values)
            assert not math.isnan(similarity.cluster_stats(clusters.labels, clusters.cosines)["clusters"])


def test_empty_responses_are_groups_of_their_own_and_never_nan():
    vectors = NGRAMS(["", " \n", "a", "a", "\U0001f389", "\U0001f389", "\u200b", "b"], 8)
    cfg = script.Config(similarity_threshold="0.9")
    clusters = similar.cluster(cfg, torch.ones(1, 8), vectors, Threshold(0.9))
    found = script.similarity_advantages(*clusters, cfg)
    stats = similarity.cluster_stats(clusters.labels, clusters.cosines)
    pair = 2**-0.5  # the two "a" and the two of the emoji; all others are alone
    shaped = row(1.0, 1.0, pair, pair, pair, pair, 1.0, 1.0)
    torch.testing.assert_close(found, group_advantages(shaped, "batch"))
    assert stats["clusters"] == 6 and stats["singletons"] == 0.5
