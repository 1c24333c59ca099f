"""Clusters of similar responses to one prompt; diversity.py has the rules for what they change.

Dims: P prompts, G completions per prompt, n completions of one prompt, D embedding width.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from common.base.distributed import print_main
from common.tasks.diversity import cluster_sizes, dra, group_rewards, reweight, within

# the rules are in diversity.py; those that were in this file can be named from here too
__all__ = ["Threshold", "cluster", "cluster_by_silhouette", "cluster_groups", "cluster_stats", "cosines", "dra",
           "group_rewards", "reweight", "within"]  # fmt: skip

NUM_CALIBRATION = 5  # batches that set an automatic threshold
QUANTILE = 0.7  # of a batch's cosines: at an automatic threshold, about a third of the pairs are alike
TOLERANCE = 5e-7  # of a cosine; embeddings are fp32, so equal directions differ by 1e-7


# Rows are sorted before clustering, because rounding in a matrix product and the choice between
# equal distances depend on their order.


def cosines(embeddings: torch.Tensor) -> torch.Tensor:
    """Cosine of every pair of responses to one prompt.

    Args:
        embeddings: [n, D] or [P, G, D], any float dtype, of any length.

    Returns:
        [n, n] or [P, G, G] fp32 on the CPU. A zero vector has cosine 0 with all others and 1 with
        itself.

    Raises:
        FloatingPointError: an embedding is not finite.
    """
    if embeddings.dim() == 3:
        parts = [cosines(group) for group in embeddings]
        return torch.stack(parts) if parts else torch.zeros(0, embeddings.shape[1], embeddings.shape[1])
    distinct, places, zero = _distinct(embeddings)
    found = distinct[places][:, places]
    found[zero] = found[:, zero] = 0.0
    np.fill_diagonal(found, 1.0)
    return torch.from_numpy(found).float()


def cluster(embeddings: torch.Tensor, threshold: float) -> torch.Tensor:
    """Complete linkage: merges clusters if all pairs across them have at least this cosine.

    Args:
        embeddings: [n, D]. A zero vector is a cluster of its own.
        threshold: cosine; above 1 no responses are merged, at -1 and below all but the zero vectors
            are.

    Returns:
        [n] int64, numbered from 0 in order of first appearance.

    Raises:
        ValueError: the threshold is NaN.
        FloatingPointError: an embedding is not finite.
    """
    if math.isnan(threshold):
        raise ValueError(f"threshold = {threshold}: must be a cosine, such as 0.9")
    distinct, places, zero = _distinct(embeddings)
    groups = np.arange(len(places))
    if threshold <= 1 and len(places):
        found = np.ones(1)
        if len(distinct) > 1:
            tree = linkage(squareform(1.0 - distinct, checks=False), "complete")
            found = fcluster(tree, 1.0 - threshold + TOLERANCE, "distance")
        # a zero vector has distance 1 from all, so that no clusters are merged because of it
        groups = np.where(zero, -1 - groups, found[places])
    return _numbered(groups)


def cluster_by_silhouette(embeddings: torch.Tensor, max_clusters: int = 7, min_silhouette: float = 0.1) -> torch.Tensor:
    """Average linkage over 1 - cosine, with the number of clusters of the best mean silhouette.

    Args:
        embeddings: [n, D]. Zero vectors are alike, and at distance 1 from all others.
        max_clusters: largest number of clusters tried; ties go to the smaller number.
        min_silhouette: below this mean silhouette, -1 to 1, all responses are one cluster, as they
            are for n < 3.

    Returns:
        [n] int64, numbered from 0 in order of first appearance.

    Raises:
        FloatingPointError: an embedding is not finite.
    """
    from sklearn.metrics import silhouette_score  # takes a second to import

    distinct, places, _ = _distinct(embeddings)
    order = np.argsort(places, kind="stable")
    distances = 1.0 - distinct[places[order]][:, places[order]]
    distances[distances < TOLERANCE] = 0.0  # rounding errors can have excellent silhouettes
    groups, best = np.zeros(len(places), dtype=np.int64), -math.inf
    if len(places) < 3 or not distances.any():
        return _numbered(groups)
    tree = linkage(squareform(distances, checks=False), "average")
    for k in range(2, min(max_clusters, len(places) - 1) + 1):
        found = fcluster(tree, k, "maxclust")
        if found.max() < k:  # equal distances are not cut apart: this is a smaller k again
            continue
        silhouette = silhouette_score(distances, found, metric="precomputed")
        if silhouette >= min_silhouette and silhouette > best + 1e-9:
            groups[order], best = found, silhouette
    return _numbered(groups)


def cluster_groups(
    embeddings: torch.Tensor, rewards: torch.Tensor, threshold: float, only_positive: bool = True
) -> torch.Tensor:
    """Clusters the responses to each prompt, see `cluster`.

    Args:
        embeddings: [P, G, D].
        rewards: [P, G]; NaN = unscored.
        threshold: cosine.
        only_positive: leave out responses whose reward is not above 0, not only unscored ones.

    Returns:
        [P, G] int64, numbered from 0 in each row; -1 for responses left out.
    """
    rewards = rewards.cpu()
    labels = torch.full(rewards.shape, -1)
    for row, group, kept in zip(labels, embeddings, rewards > 0 if only_positive else rewards.isfinite(), strict=True):
        row[kept] = cluster(group[kept], threshold)
    return labels


def cluster_stats(labels: torch.Tensor, cosines: torch.Tensor) -> dict[str, float]:
    """Metrics of the clusters of a batch.

    Args:
        labels: [P, G]; -1 for rows that are in no cluster.
        cosines: [P, G, G], see `cosines`.

    Returns:
        Means over prompts: `clusters` (number) and `cosine` (mean over the pairs of a group); over
        prompts with labelled rows, `singletons` (share of labelled rows that are alone in their
        cluster) and `effective_clusters` (exp of the entropy, in nats, of the clusters' shares).
        NaN without values.
    """
    sizes, labelled = cluster_sizes(labels, labels >= 0).double(), labels >= 0
    count = labelled.sum(-1)
    any_labelled = count > 0
    # each row adds 1 / size to the number of clusters, and log(count / size) / count to the entropy
    clusters = torch.where(labelled, 1.0 / sizes, 0.0).sum(-1).round()
    alone = (labelled & (sizes == 1)).sum(-1)[any_labelled] / count[any_labelled]
    entropy = torch.where(labelled, (count[:, None] / sizes).log(), 0.0).sum(-1)[any_labelled] / count[any_labelled]
    values = {"clusters": clusters, "singletons": alone, "effective_clusters": entropy.exp(), "cosine": _pairs(cosines)}
    return {name: value.double().mean().item() for name, value in values.items()}


class Threshold:
    """The cosine at which responses count as alike: a number, or calibrated on the first batches.

    Args:
        tau: a number, also as text, or "auto": the mean, over the first 5 batches, of the 0.7
            quantile of the cosines within groups.
        quantiles: `self.quantiles` from a checkpoint, the state of an automatic threshold.

    Raises:
        ValueError: another tau.
    """

    def __init__(self, tau: float | str, quantiles: Iterable[float] = ()) -> None:
        try:
            self.tau = tau if tau == "auto" else float(tau)
        except ValueError:
            self.tau = math.nan
        if self.tau != "auto" and not math.isfinite(self.tau):
            raise ValueError(f"similarity_threshold = {tau!r}: must be a cosine, such as 0.9, or 'auto'")
        self.quantiles = list(quantiles)
        self._warned: set[str] = set()

    def __call__(self, cosines: torch.Tensor) -> float:
        """The threshold for this batch.

        Args:
            cosines: [P, G, G] of the whole batch, gathered from all ranks, so that they share one
                threshold. Groups of 1 have no pairs and leave an automatic threshold unchanged, at
                first 1.
        """
        if self.tau != "auto":
            return float(self.tau)
        pairs = _pairs(cosines).flatten().double().numpy()
        if len(self.quantiles) < NUM_CALIBRATION and len(pairs):
            self.quantiles.append(float(np.quantile(pairs, QUANTILE)))  # torch.quantile takes at most 2^24 values
        return sum(self.quantiles) / len(self.quantiles) if self.quantiles else 1.0

    def warn(self, labels: torch.Tensor, rewards: torch.Tensor) -> None:
        """Warns, once each, if the threshold separates all responses or none.

        Args:
            labels: [P, G].
            rewards: [P, G]; groups with fewer than two positive ones do not count.
        """
        positive = rewards > 0
        positives = positive.sum(-1)
        clusters = torch.where(positive, 1.0 / cluster_sizes(labels, positive), 0.0).sum(-1).round()
        counted = positives >= 2
        if not counted.any():
            return
        if np.median((clusters / positives)[counted].numpy()) == 1:
            self._warn_about(
                "has as many clusters as positive responses: this is plain GRPO; lower similarity_threshold"
            )
        if np.median(clusters[counted].numpy()) == 1:
            self._warn_about("has 1 cluster: a per-prompt factor only; raise similarity_threshold")

    def _warn_about(self, what: str) -> None:
        if what not in self._warned:
            print_main(f"warning: the median group {what}")
        self._warned.add(what)


def _pairs(cosines: torch.Tensor) -> torch.Tensor:
    """Each pair of a group once: [P, G, G] to [P, G (G - 1) / 2]."""
    i, j = torch.triu_indices(cosines.shape[-1], cosines.shape[-1], 1)
    return cosines[:, i, j]


def _distinct(embeddings: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cosines of the m distinct rows, fp64 [m, m], in an order independent of that of the rows.

    Also returns the index of each row among them, int64 [n], and which rows are zero vectors, bool
    [n].
    """
    rows = embeddings.detach().cpu().double().numpy() + 0.0  # turns -0 into 0: equal rows must have equal bytes
    if not np.isfinite(rows).all():
        bad = int(np.flatnonzero(~np.isfinite(rows).all(-1))[0])
        raise FloatingPointError(f"embedding of row {bad} is not finite: check the embedding model")
    keys = [row.tobytes() for row in rows]
    place_of = {key: place for place, key in enumerate(sorted(set(keys)))}
    places = np.array([place_of[key] for key in keys], dtype=np.int64)
    distinct = np.zeros((len(place_of), rows.shape[-1]))
    distinct[places] = rows
    lengths = np.linalg.norm(distinct, axis=-1, keepdims=True)
    distinct /= np.where(lengths > 0, lengths, 1.0)
    found = (distinct @ distinct.T).clip(-1.0, 1.0)
    np.fill_diagonal(found, 1.0)
    return found, places, lengths[places, 0] == 0


def _numbered(groups: Iterable[Any]) -> torch.Tensor:
    """[n] int64: numbered from 0 in order of first appearance."""
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups], dtype=torch.int64)
