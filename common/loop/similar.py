"""Similarity groups: clusters of embedded responses to the same prompt, or how likely each response was."""

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.base import background, devices, distributed
from common.generation.batches import Rollout
from common.run import checkpoint
from common.run.metrics import Log
from common.tasks import answers, similarity
from common.tasks.embedder import Embedder, fetch

ALL_SCORED = ("darling", "uarl", "balanced")  # methods that cluster wrong responses too


class Likeness(NamedTuple):
    """What the responses to the A prompts of all ranks have in common.

    Attributes:
        rewards: [A, G] fp32.
        labels: [A, G] int64 clusters, -1 for responses in none; None with the method "unlikeliness".
        cosines: [A, G, G] fp32; None with the method "unlikeliness".
        logps: [A, G] fp64 log-probabilities of the responses; None with the other methods.
    """

    rewards: torch.Tensor
    labels: torch.Tensor | None = None
    cosines: torch.Tensor | None = None
    logps: torch.Tensor | None = None


class SimilarityGroups:
    """Embeds responses in parallel with log-probabilities, and clusters them by cosine.

    Attributes:
        embed: the embedding model, loaded on first use; None with the method "unlikeliness".
        threshold: minimum cosine of similar responses.
    """

    def __init__(self, cfg: Any, gpus: devices.Layout, resumed: Path | None = None):
        """Finds the embedding model now, so that a missing one fails before the first rollout.

        Args:
            cfg: Config of grpo/similarity_grpo.py.
            gpus: devices of all roles.
            resumed: checkpoint with the state of an automatic threshold.
        """
        self.cfg = cfg
        self.embed: Embedder | None = None
        if cfg.embedding_model:
            with distributed.share_errors("similarity model"):
                self.embed = Embedder(fetch(cfg.embedding_model), gpus.embedder, cfg.similarity_max_tokens,
                                      cfg.similarity_batch, cfg.similarity_offload)  # fmt: skip
        quantiles = checkpoint.notes(resumed).get("cosine_quantiles", ())
        self.threshold = similarity.Threshold(cfg.similarity_threshold, quantiles)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint records: the state of an automatic threshold."""
        return {"cosine_quantiles": self.threshold.quantiles}

    def start(self, scoring: Future, batch: Rollout) -> Future:
        """Starts a thread that embeds responses as soon as they are scored; a collective.

        Args:
            scoring: future of the `Scored` of P * G responses.
            batch: the rollout of these responses.

        Returns:
            Future of embeddings [P, G, D] fp32; with the method "unlikeliness" that of `sequence_logps`.
        """
        if self.embed is None:
            return background.start(sequence_logps, batch, self.cfg.group_size)
        with distributed.share_errors("similarity model"):
            self.embed.load()  # not in the thread: it changes torch's default dtype in all threads
        embedding = background.start(embed_responses, scoring, self.embed, self.cfg)
        if self.cfg.similarity_offload:  # memory is short: do not compute anything else meanwhile
            wait([embedding])
        return embedding

    def cluster(self, rewards_PG: torch.Tensor, embedding: Future, log: Log) -> Likeness:
        """Clusters the responses of all ranks; a collective.

        Args:
            rewards_PG: [P, G] fp32 of this rank.
            embedding: from `start`.
            log: receives seconds, and metrics of the clusters.
        """
        with log.time("similarity"):
            with distributed.share_errors("similarity"):
                found = embedding.result()
            if self.embed is None:
                rewards_AG, logps_AG = gather(rewards_PG, found)
                return Likeness(rewards_AG, logps=logps_AG)
            clusters = cluster(self.cfg, rewards_PG, found, self.threshold)
        log.add(embedding_seconds=self.embed.seconds,
                **similarity.cluster_stats(clusters.labels, clusters.cosines))  # fmt: skip
        return clusters


def embed_responses(scoring: Future, embed: Any, cfg: Any) -> torch.Tensor:
    """Embeddings [P, G, D] of responses, or of their final answers.

    Args:
        scoring: future of the `Scored` of P * G responses.
        embed: an `Embedder`.
        cfg: Config of grpo/similarity_grpo.py.
    """
    texts_B = scoring.result().completions
    if cfg.similarity_text == "answer":
        texts_B = [answers.normal_answer(text) or "" for text in texts_B]
    return embed(texts_B, cfg.group_size)


def sequence_logps(batch: Rollout, group_size: int) -> torch.Tensor:
    """Log-probabilities of whole responses under the policy that sampled them, [P, G] fp64 on the CPU, in nats."""
    logps_BC = batch.rollout_logps.double().cpu()
    sampled_BC = torch.arange(logps_BC.shape[1]) < batch.lengths[:, None]  # the mask lacks rows not trained on
    return torch.where(sampled_BC, logps_BC, 0.0).sum(-1).view(-1, group_size)


def gather(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of tensors [P, ...] of all ranks, [A, ...] on the CPU, in rank order; a collective."""
    return tuple(map(torch.cat, zip(*distributed.gather_objects(tensors), strict=True)))


def cluster(
    cfg: Any, rewards_PG: torch.Tensor, embeddings_PGD: torch.Tensor, threshold: similarity.Threshold
) -> Likeness:
    """Clusters this rank's responses and gathers the clusters of all ranks; a collective.

    The method "within" clusters all responses, by silhouette. The other methods cluster responses by
    complete linkage at the threshold: "darling", "uarl" and "balanced" all that are scored, the
    others those with a positive reward.

    Args:
        cfg: Config of grpo/similarity_grpo.py.
        rewards_PG: [P, G] fp32.
        embeddings_PGD: [P, G, D] fp32.
        threshold: an automatic one is set from the cosines of all ranks.
    """
    (cosines_AGG,) = gather(similarity.cosines(embeddings_PGD))
    tau = threshold(cosines_AGG)
    if cfg.similarity_method == "within":
        labels_PG = torch.stack([similarity.cluster_by_silhouette(group_GD) for group_GD in embeddings_PGD])
    else:
        only_positive = cfg.similarity_method not in ALL_SCORED
        labels_PG = similarity.cluster_groups(embeddings_PGD, rewards_PG, tau, only_positive)
    rewards_AG, labels_AG = gather(rewards_PG, labels_PG)
    if cfg.similarity_method != "within":
        threshold.warn(labels_AG, rewards_AG)
    return Likeness(rewards_AG, labels_AG, cosines_AGG)
