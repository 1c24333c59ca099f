"""Supervised fine-tuning: demonstrations, the policy that learns them, and its evaluation."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from common.base import devices, distributed, memory
from common.base.checks import require
from common.distill.distillation import CrossEntropy
from common.generation import batches
from common.generation.batches import RolloutBatch
from common.loop.policy import Policy
from common.loop.sampler import Sampler, sampled_accuracies
from common.loop.student import AnsweredScorer
from common.loop.trainer import Counts
from common.model import positions, sources
from common.run import measures
from common.tasks import accuracy, demonstrations
from common.tasks.demonstrations import Demonstration
from common.training import budgets


class SFTPolicy(Policy):
    """A policy whose forward pass computes the cross-entropy of given completions."""

    def __init__(self, cfg: Any, gpus: devices.Layout | None = None, resumed: Path | None = None):
        """Loads the policy.

        Args:
            cfg: a `settings.Settings` with `policy_model`.
            gpus: its devices; default: the first GPU, or the CPU.
            resumed: checkpoint to load weights from.
        """
        usual = "on demonstrations: 1e-4 (up to 0.5 B) to 1e-5 (7 B)"
        self.load(cfg, cfg.policy_model, gpus or devices.layout(cfg.device, policy=(0,)), resumed, most=5e-4,
                  usual=usual)  # fmt: skip
        self.wrap(functools.partial(CrossEntropy, compile=cfg.compile))

    def cross_entropy(
        self, micro: RolloutBatch, weights_mC: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Cross-entropy of a micro-batch, on the replica that it was dealt to.

        Args:
            micro: m sequences.
            weights_mC: [m, C] fp32, weight of each token in the sum.

        Returns:
            The weighted sum over tokens, and per-token metrics [m, C] by name.
        """
        return cross_entropy(self.wrapped[micro.replica or 0], micro, weights_mC)


def cross_entropy(
    wrapped: CrossEntropy, micro: RolloutBatch, weights_mC: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`SFTPolicy.cross_entropy` for a wrapped model."""
    *tokens, images, group = micro.tokens
    loss, values_mCR = wrapped(*tokens, weights_mC, images=images, group=group)
    return loss.squeeze(0), dict(zip(wrapped.values, values_mCR.unbind(-1), strict=True))


def load_demonstrations(cfg: Any, policy: Policy) -> tuple[list[Demonstration], list[Demonstration]]:
    """Reads all training conversations, and this rank's share of the evaluation rows.

    Evaluation rows ask for the last reply of their conversation.

    Args:
        cfg: Config of gkd/sft.py.
        policy: the trained model.
    """
    load = functools.partial(
        demonstrations.load, tokenizer=policy.tokenizer, max_tokens=cfg.max_tokens,
        end_ids=sources.end_token_ids(policy.tokenizer, policy.model), apply_chat_template=cfg.apply_chat_template,
        system_prompt=cfg.system_prompt, template_kwargs=cfg.template_kwargs,
    )  # fmt: skip
    train = load(cfg.train_data, last_turn_only=cfg.turns == "last")
    require_fit(policy.model, train, cfg.train_data)
    held_out = []
    if cfg.eval_data and cfg.eval_every:
        held_out = load(cfg.eval_data, split="test", last_turn_only=True, max_prompt_tokens=cfg.max_prompt_tokens)
        held_out = held_out[: cfg.eval_examples]
        require_fit(policy.model, held_out, cfg.eval_data)
        accuracy.require_columns([example.columns for example in held_out], cfg.eval_columns)
    learned, tokens = sum(sum(row.learned) for row in train), sum(row.tokens for row in train)
    distributed.print_main(
        f"{cfg.train_data}: {len(train)} conversations of {tokens} tokens, of which {learned} are learned; {cfg.steps} "
        f"steps of {cfg.batch_size} are {cfg.steps * cfg.batch_size / len(train):.2f} passes"
    )
    return train, held_out[distributed.rank() :: distributed.num_ranks()]


def require_fit(model: nn.Module, rows: Sequence[Demonstration], source: str) -> None:
    """Requires conversations that the policy can read; called at the start, rather than in step 1,000.

    Args:
        model: the policy.
        rows: to learn, or to evaluate.
        source: of the data, for messages.

    Raises:
        ValueError: the policy has no such token, or too few learned positions.
    """
    size = model.get_input_embeddings().num_embeddings
    for row in rows:
        token = max(*row.prompt_ids, *row.completion_ids)
        require(token < size, f"{source}, row {row.index}: token {token}", f"the policy has {size} tokens, fewer than "
                "its tokenizer", "take the tokenizer that belongs to it, or resize its embeddings")  # fmt: skip
    longest = max(row.tokens for row in rows)
    places = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit, reason = positions.longest_sequence(model)
    what = f"{source}: conversations of up to {longest} tokens"
    require(limit is None or longest <= limit, what, reason, f"set max_tokens to {limit} or less")
    if places is not None and longest > places:
        distributed.print_main(f"warning: {what}, but the policy was made for {places}: lower max_tokens")


def batch_of(examples_P: Sequence[Demonstration], pad_id: int, device: torch.device) -> RolloutBatch:
    """Demonstrations as a batch, one row each; tokens that are not learned are outside the loss.

    Args:
        examples_P: rows.
        pad_id: fills rows up.
        device: of the policy.
    """
    tokens_PC = pad_sequence([torch.tensor(row.completion_ids) for row in examples_P], True, -1).long().to(device)
    learned_PC = pad_sequence([torch.tensor(row.learned) for row in examples_P], True, 0).bool().to(device)
    last = {row.completion_ids[-1] for row in examples_P}  # every completion ends with an end token
    found = batches.assemble([row.prompt_ids for row in examples_P], 1, tokens_PC,
                             torch.zeros(tokens_PC.shape, device=device), pad_id, sorted(last))  # fmt: skip
    found.completion_mask = learned_PC
    found.not_learned = torch.tensor([len(row.learned) - sum(row.learned) for row in examples_P])
    return found


@torch.no_grad()
def evaluate(
    cfg: Any, sampler: Sampler, policy: SFTPolicy, scorer: AnsweredScorer, examples: Sequence[Demonstration],
    loss: Callable, step: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Evaluates a policy over the examples of all ranks; a collective.

    Args:
        cfg: Config of gkd/sft.py.
        sampler: samples completions.
        policy: the trained model.
        scorer: scores them.
        examples: of this rank.
        loss: of the script: (policy, micro, cfg, counts) -> loss, `Stats`.
        step: steps done, for reward functions.

    Returns:
        Reward of greedy completions and accuracies of sampled ones, as in `sampler.evaluate`, of
        rows with an answer; `eval_nll` and `eval_token_accuracy` of the tokens of held-out replies.
    """
    policy, tokens, greedy = policy.unsharded, cfg.micro_batch_tokens or budgets.TOKENS, []
    sums = dict.fromkeys(("nll", "token_accuracy", "tokens"), 0.0)
    with distributed.share_errors("evaluate"):
        answered = [e for e in examples if e.answer is not None]
        accuracies = sampled_accuracies(cfg, sampler, functools.partial(scorer.score, least=1), answered, step)
        for part in [examples[i : i + cfg.batch_size] for i in range(0, len(examples), cfg.batch_size)]:
            greedy.append(scorer.score(part, sampler.sample(part, temperature=0), step))
            replies = batch_of(part, sampler.pad_id, policy.home)
            (micros,) = replies.minibatches(1, tokens, policy.packs(replies))
            for micro, stats in memory.map_with_halving(micros, lambda micro: loss(policy, micro, cfg, Counts())[1]):
                for name, value in {**stats.means, "tokens": 1.0}.items():
                    if name in sums:
                        sums[name] += float(value) * micro.num_tokens
    totals = {name: distributed.sum_over_ranks(total) for name, total in sums.items()}
    count = totals.pop("tokens")
    means = {f"eval_{name}": total / count for name, total in totals.items() if count}
    rewards = measures.mean_rewards(greedy, examples, cfg.eval_columns, accuracies)
    return means if math.isnan(rewards["eval_reward"]) else rewards | means
