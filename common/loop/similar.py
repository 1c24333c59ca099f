"""Similarity groups: embeds the responses of a rollout and clusters those to the same prompt."""

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from common.base import background, devices, distributed
from common.run import checkpoint
from common.run.metrics import Log
from common.tasks import answers, similarity
from common.tasks.embedder import Embedder, fetch


class SimilarityGroups:
    """Embeds responses in parallel with log-probabilities, and clusters them by cosine.

    Attributes:
        embed: the embedding model, loaded on first use.
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
        with distributed.share_errors("similarity model"):
            self.embed = Embedder(fetch(cfg.embedding_model), gpus.embedder, cfg.similarity_max_tokens,
                                  cfg.similarity_batch, cfg.similarity_offload)  # fmt: skip
        quantiles = checkpoint.notes(resumed).get("cosine_quantiles", ())
        self.threshold = similarity.Threshold(cfg.similarity_threshold, quantiles)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint records: the state of an automatic threshold."""
        return {"cosine_quantiles": self.threshold.quantiles}

    def start(self, scoring: Future) -> Future:
        """Starts a thread that embeds responses as soon as they are scored; a collective.

        Args:
            scoring: future of the `Scored` of P * G responses.

        Returns:
            Future of embeddings [P, G, D] fp32.
        """
        with distributed.share_errors("similarity model"):
            self.embed.load()  # not in the thread: it changes torch's default dtype in all threads
        embedding = background.start(embed_responses, scoring, self.embed, self.cfg)
        if self.cfg.similarity_offload:  # memory is short: do not compute anything else meanwhile
            wait([embedding])
        return embedding

    def cluster(
        self, rewards_PG: torch.Tensor, embedding: Future, log: Log
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Clusters the responses of all ranks; a collective.

        Args:
            rewards_PG: [P, G] fp32 of this rank.
            embedding: from `start`.
            log: receives seconds, and metrics of the clusters.

        Returns:
            For the A prompts of all ranks: rewards [A, G]; labels [A, G], -1 for responses in no
            cluster; and cosines [A, G, G].
        """
        with log.time("similarity"):
            with distributed.share_errors("similarity"):
                embeddings_PGD = embedding.result()
            clusters = cluster(self.cfg, rewards_PG, embeddings_PGD, self.threshold)
        log.add(embedding_seconds=self.embed.seconds, **similarity.cluster_stats(*clusters[1:]))
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


def cluster(
    cfg: Any, rewards_PG: torch.Tensor, embeddings_PGD: torch.Tensor, threshold: similarity.Threshold
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clusters this rank's responses and gathers the clusters of all ranks; a collective.

    The method "within" clusters all responses, by silhouette. The other methods cluster responses
    with a positive reward, by complete linkage at the threshold.

    Args:
        cfg: Config of grpo/similarity_grpo.py.
        rewards_PG: [P, G] fp32.
        embeddings_PGD: [P, G, D] fp32.
        threshold: an automatic one is set from the cosines of all ranks.

    Returns:
        As `SimilarityGroups.cluster`.
    """
    cosines_AGG = torch.cat(distributed.gather_objects(similarity.cosines(embeddings_PGD)))
    tau = threshold(cosines_AGG)
    if cfg.similarity_method == "within":
        labels_PG = torch.stack([similarity.cluster_by_silhouette(group_GD) for group_GD in embeddings_PGD])
    else:
        labels_PG = similarity.cluster_groups(embeddings_PGD, rewards_PG, tau)
    rewards_AG, labels_AG = map(torch.cat, zip(*distributed.gather_objects((rewards_PG, labels_PG)), strict=True))
    if cfg.similarity_method != "within":
        threshold.warn(labels_AG, rewards_AG)
    return rewards_AG, labels_AG, cosines_AGG
