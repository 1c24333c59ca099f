"""Reproduces claims of the papers at toy scale with the code of common/, and prints a table of which hold.

Run:   python scripts/dev/claims.py                              all claims, minutes on one CPU core
       python scripts/dev/claims.py length diversity --out claims.md
The exit code is 1 if an acceptance criterion is not met. Policies are small tables of logits, in row 16 a tiny
model with random weights: they show a mechanism and its size, not what a language model will do. Rows 12 to 15 and 17
are in claims_distill.py, row 16 is in claims_logits.py.

Dims:  P prompts, G completions per prompt, B = P*G, C completion tokens, V vocabulary, K arms, m one
       minibatch, R independent runs
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
from claims_base import BEGIN, DIGITS, END, Row, spread, write_digits
from claims_distill import distillation, steps_to_teacher, tail_bucket
from claims_logits import bf16_logits

from common.maths import advantages, losses
from common.tasks import diversity

# --- 1, 2, 3: a policy that copies digits, trained on minibatches that grow stale ---

GRPO_CLIP = (0.2, 0.27)  # arXiv 2507.18071, section 5.1


def policy_loss(
    kind: str,
    logps_mC: torch.Tensor,
    old_logps_mC: torch.Tensor,
    advantages_m: torch.Tensor,
    mask_mC: torch.Tensor,
    clip_range: tuple[float, float],
    num_sequences: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of GSPO, or of GRPO with the mean over each sequence, and the ratio of every token [m, C]."""
    if kind == "gspo":
        ratio_m = losses.sequence_ratio(logps_mC, old_logps_mC, mask_mC)
        loss = -losses.clipped_surrogate(ratio_m, advantages_m, *clip_range).sum() / num_sequences
        return loss, ratio_m[:, None].expand(mask_mC.shape)
    ratio_mC = losses.token_ratio(logps_mC, old_logps_mC)
    surrogate_mC = losses.clipped_surrogate(ratio_mC, advantages_m, *clip_range)
    return -losses.aggregate(surrogate_mC, mask_mC, "seq_mean", num_sequences), ratio_mC


def train_digits(
    kind: str,
    clip_range: tuple[float, float],
    steps: int,
    lr: float,
    minibatches: int,
    epochs: int,
    runs: int,
    P: int = 32,
    G: int = 8,
) -> dict[str, list[float]]:
    """Trains tables from uniform, one per run and all at once.

    Returns:
        For each run: `clipped` (share of the tokens without a gradient), `end` and `mean` (reward over the last 10
        steps and over all).
    """
    rng = torch.Generator().manual_seed(0)
    table = torch.zeros(runs * DIGITS, BEGIN + 1, END + 1, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=lr)
    first_row, first_group = torch.arange(runs)[:, None] * DIGITS, torch.arange(runs)[:, None] * P
    rewards, clipped = [], []
    for _ in range(steps):
        prompts_B = (torch.randint(DIGITS, (runs, P), generator=rng) + first_row).flatten().repeat_interleave(G)
        tokens_BC, before_BC, mask_BC, rewards_B = write_digits(table.detach(), prompts_B, rng)
        advantages_B = advantages.group_advantages(rewards_B.view(-1, G), "group").flatten()
        old_logps_BC = table.detach().log_softmax(-1)[prompts_B[:, None], before_BC, tokens_BC]
        rewards.append(rewards_B.view(runs, -1).mean(1))
        for _ in range(epochs):
            for groups in torch.rand(runs, P, generator=rng).argsort(1).chunk(minibatches, 1):
                m = ((groups + first_group)[..., None] * G + torch.arange(G)).flatten()
                logps_mC = table.log_softmax(-1)[prompts_B[m, None], before_BC[m], tokens_BC[m]]
                mask_mC = mask_BC[m]
                loss, ratio_mC = policy_loss(
                    kind, logps_mC, old_logps_BC[m], advantages_B[m], mask_mC, clip_range, len(m) // runs
                )
                optimizer.zero_grad()
                loss.backward()
                norms = table.grad.view(runs, -1).norm(dim=1)  # every run has its own norm
                table.grad /= norms.clamp(min=1).repeat_interleave(DIGITS)[:, None, None]
                optimizer.step()
                parts = zip(*(x.chunk(runs) for x in (ratio_mC, advantages_B[m], mask_mC)), strict=True)
                stats = [
                    losses.clip_stats(ratio, adv, losses.outside(ratio, *clip_range), mask)
                    for ratio, adv, mask in parts
                ]
                clipped.append(torch.stack([each["clip_fraction"] for each in stats]))
    rewards = torch.stack(rewards)
    return {
        "clipped": torch.stack(clipped).mean(0).tolist(),
        "end": rewards[-10:].mean(0).tolist(),
        "mean": rewards.mean(0).tolist(),
    }


def clip(runs: int = 3, steps: int = 80) -> list[Row]:
    """Rows 1 and 3: four minibatches per rollout."""
    setting = dict(steps=steps, lr=0.02, minibatches=4, epochs=1, runs=runs)
    gspo = train_digits("gspo", losses.CLIP_PRESETS["paper"], **setting)
    dense = train_digits("gspo", losses.CLIP_PRESETS["dense"], **setting)
    grpo = train_digits("grpo", GRPO_CLIP, **setting)

    def column(name: str, digits: int) -> str:
        return "; ".join(
            f"{label} {spread(run[name], digits)}"
            for label, run in (("GSPO 3e-4/4e-4", gspo), ("GSPO 3e-3/4e-3", dense), ("GRPO", grpo))
        )

    return [
        Row(
            1,
            "GSPO clips about 100 times the tokens that GRPO clips (arXiv 2507.18071, section 5.2)",
            f"share of the tokens clipped: {column('clipped', 4)}",
            f"GSPO 3e-4/4e-4 at least 0.05 and 30 times GRPO; each of {runs} runs",
            all(a >= max(0.05, 30 * b) for a, b in zip(gspo["clipped"], grpo["clipped"], strict=True)),
        ),
        Row(
            3,
            "GSPO learns more from the same samples than GRPO (arXiv 2507.18071, Fig. 1)",
            f"reward over the last 10 steps: {column('end', 2)}; over all {steps}: {column('mean', 2)}; {runs} runs",
            "none",
            None,
        ),
    ]


def stale(runs: int = 8, steps: int = 30) -> list[Row]:
    """Row 2: sixteen minibatches, four passes over each rollout."""
    setting = dict(steps=steps, lr=0.3, minibatches=16, epochs=4, runs=runs)
    end = {
        "GSPO 3e-4/4e-4": train_digits("gspo", losses.CLIP_PRESETS["paper"], **setting)["end"],
        "GSPO 3e-3/4e-3": train_digits("gspo", losses.CLIP_PRESETS["dense"], **setting)["end"],
        "GRPO": train_digits("grpo", GRPO_CLIP, **setting)["end"],
        "token ratio without a clip": train_digits("grpo", (1e9, 1e9), **setting)["end"],
    }
    mean = {name: sum(values) / runs for name, values in end.items()}
    return [
        Row(
            2,
            "GSPO stays stable on stale minibatches (arXiv 2507.18071, sections 3 to 5)",
            "reward over the last 10 steps: " + "; ".join(f"{name} {spread(values)}" for name, values in end.items()),
            f"GSPO 3e-4/4e-4 at least 0.30, GRPO at most 0.15, no clip at most 0.05; means of {runs} runs",
            mean["GSPO 3e-4/4e-4"] >= 0.30 and mean["GRPO"] <= 0.15 and mean["token ratio without a clip"] <= 0.05,
        )
    ]


# --- 4: before the first update the two losses are one ---


def on_policy() -> list[Row]:
    """Row 4: gradients of both losses where the ratio is 1."""
    rng = torch.Generator().manual_seed(0)
    table = torch.randn(DIGITS, BEGIN + 1, END + 1, generator=rng).requires_grad_()
    prompts_B = torch.randint(DIGITS, (32,), generator=rng).repeat_interleave(8)
    tokens_BC, before_BC, mask_BC, _ = write_digits(table.detach(), prompts_B, rng)
    advantages_B = advantages.group_advantages(torch.rand(32, 8, generator=rng), "group").flatten()
    logps_BC = table.log_softmax(-1)[prompts_B[:, None], before_BC, tokens_BC]
    gspo, grpo = (
        torch.autograd.grad(
            policy_loss(kind, logps_BC, logps_BC.detach(), advantages_B, mask_BC, (0.2, 0.2), len(mask_BC))[0],
            table,
            retain_graph=True,
        )[0]
        for kind in ("gspo", "grpo")
    )
    difference, size = (gspo - grpo).abs().max().item(), grpo.abs().max().item()
    return [
        Row(
            4,
            "On-policy, GSPO is GRPO with the mean over each sequence (arXiv 2507.18071, Eq. 10 and 12)",
            f"largest difference of gradients {difference:.0e}, largest gradient {size:.0e}",
            "difference below 1e-6, and gradients above 1e-3, so that this says something",
            difference < 1e-6 and size > 1e-3,
        )
    ]


# --- 5, 6: length bias ---

START_LENGTH, LENGTH_CAP = 10, 200


def average(values_BC: torch.Tensor, mask_BC: torch.Tensor, how: str, G: int) -> torch.Tensor:
    """Mean of per-token values in the four ways that row 5 compares."""
    B = len(values_BC)
    if how == "GRPO":
        return losses.aggregate(values_BC, mask_BC, "seq_mean", B)
    if how == "DAPO per prompt":  # arXiv 2503.14476, Eq. 8: the tokens of a group are one long row
        return losses.aggregate(values_BC.view(B // G, -1), mask_BC.view(B // G, -1), "seq_mean", B // G)
    if how == "token-mean of the batch":
        return losses.aggregate(values_BC, mask_BC, "token_mean", mask_BC.sum().item())
    return losses.aggregate(values_BC, mask_BC, "constant", B * START_LENGTH)


def mean_lengths(how: str, seed: int, steps: int, P: int = 64, G: int = 8) -> tuple[float, float]:
    """Mean length of wrong and of correct answers after training, both 10 before.

    Whether an answer is correct is drawn, not chosen, and what is trained is one logit of the end token for either
    kind. The reward says nothing about length, so every change of length is the doing of the aggregation.
    """
    rng = torch.Generator().manual_seed(seed)
    end_logit = torch.full((2,), 1 / START_LENGTH).logit().requires_grad_()
    for _ in range(steps):
        correct_B = torch.randint(2, (P * G,), generator=rng)
        end_prob_B = end_logit.detach().sigmoid()[correct_B].double()
        uniform_B = 1 - torch.rand(P * G, generator=rng, dtype=torch.float64)  # above 0
        length_B = (uniform_B.log() / torch.log1p(-end_prob_B)).ceil().clamp(min=1)  # geometric
        positions = torch.arange(1, 1 + int(length_B.max().clamp(max=LENGTH_CAP)))
        mask_BC, ends_BC = positions <= length_B[:, None], positions == length_B[:, None]
        # std of the group for every mode: the four differ in nothing but the aggregation
        advantages_B = advantages.group_advantages(correct_B.view(P, G), "group").flatten()
        end, go_on = logsigmoid(end_logit)[correct_B], logsigmoid(-end_logit)[correct_B]
        logps_BC = torch.where(ends_BC, end[:, None], go_on[:, None])
        ratio_BC = losses.token_ratio(logps_BC, logps_BC.detach())
        objective = average(losses.clipped_surrogate(ratio_BC, advantages_B, 0.2, 0.2), mask_BC, how, G)
        with torch.no_grad():
            end_logit += 0.1 * torch.autograd.grad(objective, end_logit)[0]
    wrong, right = (1 / end_logit.detach().sigmoid()).tolist()
    return wrong, right


def length(runs: int = 8, steps: int = 300) -> list[Row]:
    """Row 5: the length of answers under four ways to average over tokens."""
    found = {}
    for how in ("GRPO", "DAPO per prompt", "token-mean of the batch", "Dr. GRPO"):
        found[how] = list(zip(*(mean_lengths(how, seed, steps) for seed in range(runs)), strict=True))
    grpo_wrong, grpo_correct = found["GRPO"]
    return [
        Row(
            5,
            "GRPO makes wrong answers longer and correct ones shorter, Dr. GRPO does not (arXiv 2503.20783, "
            "section 3.1)",
            "mean length of wrong / correct answers, 10 / 10 at the start: "
            + "; ".join(f"{how} {spread(wrong, 1)} / {spread(right, 1)}" for how, (wrong, right) in found.items()),
            f"GRPO wrong at least 20, correct at most 5; Dr. GRPO both within 5 % of 10; each of {runs} runs",
            min(grpo_wrong) >= 20
            and max(grpo_correct) <= 5
            and all(abs(value / START_LENGTH - 1) <= 0.05 for kind in found["Dr. GRPO"] for value in kind),
        )
    ]


def closed_form(end_probs: tuple[float, ...] = (0.05, 0.1, 0.3, 0.5), longest: int = 600) -> list[Row]:
    """Row 6: the expected push on the end token's logit, from a batch with every length once, weighted by chance."""
    exact_error, aggregate_error = [], []
    lengths = torch.arange(1, longest + 1)
    ends_BC, mask_BC = lengths == lengths[:, None], lengths <= lengths[:, None]
    for p in end_probs:
        expected = p * math.log(1 / p) / (1 - p) - p
        exact = lengths.double()
        probs_B = p * (1 - p) ** (exact - 1)  # what is longer than `longest` has a probability of 5e-14 at most
        exact_error.append(abs((probs_B * (1 - exact * p) / exact).sum().item() - expected))

        end_logit = torch.tensor(p, dtype=torch.float64).logit().requires_grad_()
        logps_BC = torch.where(ends_BC, logsigmoid(end_logit), logsigmoid(-end_logit))
        value = losses.aggregate(probs_B[:, None] * logps_BC, mask_BC, "seq_mean", 1)
        aggregate_error.append(abs(torch.autograd.grad(value, end_logit)[0].item() - expected))
    return [
        Row(
            6,
            "The mean over each sequence pushes the logit of the end token by A (p ln(1/p) / (1-p) - p), which is not "
            "0 (follows from arXiv 2503.20783, section 3.1)",
            f"off by {max(exact_error):.0e} as an exact sum in fp64, by {max(aggregate_error):.0e} through aggregate",
            # the terms add up to less than 1 in size, and each has a few rounding errors of 6e-8 of its own size
            "1e-8 in fp64; 1e-6 through aggregate, which is fp32",
            max(exact_error) <= 1e-8 and max(aggregate_error) <= 1e-6,
        )
    ]


# --- 7: which KL divergence a KL term in the loss descends ---


def kl(runs: int = 5) -> list[Row]:
    """Row 7: exact expected gradients over three tokens, compared with those of the two KL divergences."""
    errors: dict[str, list[float]] = {}
    apart = []
    for seed in range(runs):
        rng = torch.Generator().manual_seed(seed)
        logits, ref, old = torch.randn(3, 3, generator=rng, dtype=torch.float64).log_softmax(-1)
        logits.requires_grad_()
        logps = logits.log_softmax(-1)
        sampled_pi, sampled_old = logps.detach().exp(), old.exp()
        k1, k2, k3 = (losses.kl_estimate(logps, ref, kind) for kind in ("k1", "k2", "k3"))
        on_ratio, off_ratio = losses.token_ratio(logps, logps.detach()), losses.token_ratio(logps, old)
        reverse, forward = (logps.exp() * (logps - ref)).sum(), (ref.exp() * (ref - logps)).sum()
        pairs = {
            "k1 against 0": (sampled_pi * k1, 0 * logps),
            "k2 against KL(pi, ref)": (sampled_pi * k2, reverse),
            "k3 against KL(ref, pi)": (sampled_pi * k3, forward),
            "ratio k3 against KL(pi, ref), on-policy": (sampled_pi * on_ratio * k3, reverse),
            "the same off-policy": (sampled_old * off_ratio * k3, reverse),
            "apart": (reverse, forward),
        }
        for name, values in pairs.items():
            a, b = (torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in values)
            (apart if name == "apart" else errors.setdefault(name, [])).append((a - b).abs().max().item())
    return [
        Row(
            7,
            "As a loss, k1 has no gradient, k2 that of KL(pi, ref), k3 that of KL(ref, pi), and ratio x k3 that of "
            "KL(pi, ref), also off-policy (k3 is arXiv 2402.03300, Eq. 4; ratio x k3 is arXiv 2512.02556)",
            "largest error of a gradient: "
            + "; ".join(f"{name} {max(values):.0e}" for name, values in errors.items())
            + f". The two divergences differ by at least {min(apart):.0e}",
            "errors at most 1e-6, divergences at least 1e-2 apart",
            max(max(values) for values in errors.values()) <= 1e-6 and min(apart) >= 1e-2,
        )
    ]


# --- 8: a wider clip range above 1 ---


def explore(
    epsilon_high: float, optimizer_class: type, lr: float, P: int, runs: int, steps: int, G: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains bandits with one rare correct arm: entropy in nats, and probability of that arm, [steps, runs]."""
    rng = torch.Generator().manual_seed(0)
    probs_K = torch.tensor([0.01] + [0.11] * 9)  # arm 0 is the correct one
    logits = probs_K.log().repeat(runs, 1).requires_grad_()
    optimizer = optimizer_class([logits], lr=lr)
    entropy, correct = [], []
    for _ in range(steps):
        old_logps = logits.detach().log_softmax(-1)
        arms_RB = torch.multinomial(old_logps.exp(), P * G, replacement=True, generator=rng)
        advantages_RB = advantages.group_advantages((arms_RB == 0).view(-1, G), "group").view(runs, -1)
        for m in torch.rand(runs, P * G, generator=rng).argsort(1).chunk(16, 1):
            arms_Rm = arms_RB.gather(1, m)
            ratio = losses.token_ratio(logits.log_softmax(-1).gather(1, arms_Rm), old_logps.gather(1, arms_Rm))
            surrogate = losses.clipped_surrogate(ratio, advantages_RB.gather(1, m), 0.2, epsilon_high)
            loss = -losses.aggregate(surrogate, torch.ones_like(ratio), "token_mean", m.shape[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logps = logits.detach().log_softmax(-1)
        entropy.append(-(logps.exp() * logps).sum(-1))
        correct.append(logps[:, 0].exp())
    return torch.stack(entropy), torch.stack(correct)


def clip_higher(runs: int = 5, steps: int = 100) -> list[Row]:
    """Row 8: sixteen minibatches, two optimizers and two batch sizes."""
    parts, winners = [], []
    for optimizer_class, lr in ((torch.optim.Adam, 0.05), (torch.optim.SGD, 0.5)):
        for P in (32, 128):
            (low, low_correct), (high, high_correct) = (
                explore(epsilon_high, optimizer_class, lr, P, runs, steps) for epsilon_high in (0.2, 0.28)
            )
            winners.append(int((high[-1] > low[-1]).sum()))
            halfway = [(x < 0.5).sum(0).float().mean().item() + 1 for x in (high_correct, low_correct)]
            parts.append(
                f"{optimizer_class.__name__} {lr}, {P} groups: {spread(high[-1].tolist(), 4)} against "
                f"{spread(low[-1].tolist(), 4)}, higher in {winners[-1]}/{runs} runs, P(correct) above 1/2 in step "
                f"{halfway[0]:.0f} against {halfway[1]:.0f}"
            )
    robust = sum(count == runs for count in winners)
    return [
        Row(
            8,
            "Clip-higher keeps entropy (arXiv 2503.14476, section 3.1), here with one rare correct arm of ten",
            f"higher in every run in {robust} of {len(parts)} settings. Entropy after {steps} steps, 0.2/0.28 against "
            f"0.2/0.2: {'; '.join(parts)}",
            "none (a higher entropy in every run would show it)",
            None,
        )
    ]


# --- 9, 10, 11: rewards that count how many responses are alike ---

ARMS, CORRECT = 12, 6  # the first six are correct
METHODS = {  # and how the table calls them
    "grpo": "GRPO",
    "discount": "discount (alpha 0.5)",
    "darling": "DARLING",
    "dra": "DRA",
    "mmr": "MMR",
    "unlikeliness": "unlikeliness (0.25)",
    "reweight": "reweight (alpha 1)",
    "uarl": "UARL (alpha 1)",
    "balanced": "balanced (alpha 1)",
    "within": "within (kappa 1)",
}


def shaped_advantages(
    method: str, rewards: torch.Tensor, labels: torch.Tensor, logps: torch.Tensor, runs: int
) -> torch.Tensor:
    """Advantages [groups, G] by one of the methods; groups of a run are adjacent."""
    if method == "balanced":
        return diversity.balanced(rewards, labels, 1.0)
    if method == "within":
        return diversity.within(rewards, labels, 1.0, "group")
    cosines = 0.5 + 0.5 * (labels[:, :, None] == labels[:, None, :])  # those of different arms are 0.5
    if method == "discount":  # std of the batch, per run
        shaped = diversity.group_rewards(rewards, labels, 0.5).chunk(runs)
        return torch.cat([advantages.group_advantages(part, "batch") for part in shaped])
    if method == "darling":  # as in the paper, without a standard deviation
        return advantages.group_advantages(diversity.darling(rewards, labels), "none")
    if method == "dra":
        rewards = diversity.dra(rewards, cosines)
    elif method == "mmr":
        rewards = diversity.mmr(rewards, cosines)
    elif method == "unlikeliness":  # takes no labels
        rewards = diversity.unlikeliness(rewards, logps, 0.25)
    shaped = advantages.group_advantages(rewards, "group")
    if method == "reweight":
        return diversity.reweight(shaped, labels, 1.0)
    return diversity.uarl(shaped, labels, 1.0) if method == "uarl" else shaped


def bandit(
    method: str, noise: float, runs: int, steps: int, P: int = 16, G: int = 8
) -> tuple[list[float], list[float]]:
    """Effective number of correct arms, exp(entropy) of their shares, and P(correct), per run.

    Clusters are the arms; `noise` is the share of labels drawn at random instead.
    """
    rng = torch.Generator().manual_seed(0)
    start = torch.cat([torch.linspace(1.5, 0, CORRECT), torch.full((ARMS - CORRECT,), 0.5)])
    logits = start.repeat(runs, 1).requires_grad_()
    for _ in range(steps):
        logps_RK = logits.log_softmax(-1)
        arms_RB = torch.multinomial(logps_RK.detach().exp(), P * G, replacement=True, generator=rng)
        arms = arms_RB.view(-1, G)
        wrong_label = torch.rand(arms.shape, generator=rng) < noise
        labels = torch.where(wrong_label, torch.randint(ARMS, arms.shape, generator=rng), arms)
        logps_B1 = logps_RK.gather(1, arms_RB).view(-1, 1)
        rewards, logps = (arms < CORRECT).float(), logps_B1.detach().view(-1, G)
        advantages_B1 = shaped_advantages(method, rewards, labels, logps, runs).view(-1, 1)
        ratio_B1 = losses.token_ratio(logps_B1, logps_B1.detach())
        surrogate_B1 = losses.clipped_surrogate(ratio_B1, advantages_B1, 0.2, 0.2)
        objective = losses.aggregate(surrogate_B1, torch.ones_like(ratio_B1), "seq_mean", P * G)
        with torch.no_grad():
            logits += 0.5 * torch.autograd.grad(objective, logits)[0]
    probs = logits.detach().softmax(-1)[:, :CORRECT]
    shares = probs / probs.sum(-1, keepdim=True)
    modes = torch.special.entr(shares).sum(-1).exp()
    return modes.tolist(), probs.sum(-1).tolist()


def keep_modes(runs: int = 5, steps: int = 500) -> list[Row]:
    """Rows 9 and 10: how many of six equally good arms survive training."""
    results = {noise: {name: bandit(name, noise, runs, steps) for name in METHODS} for noise in (0.0, 0.5)}
    measured = {
        noise: "effective correct arms of 6, P(correct): "
        + "; ".join(
            f"{METHODS[name]} {spread(modes)}, {spread(correct, 3)}" for name, (modes, correct) in found.items()
        )
        for noise, found in results.items()
    }
    modes, correct = results[0.0]["discount"]
    return [
        Row(
            9,
            "GRPO ends in few of the ways to be right, rewards that count similar responses keep more "
            "(arXiv 2509.02534, Table 1; arXiv 2601.08763)",
            measured[0.0],
            f"GRPO at most 2; discount at least 4.5, with P(correct) at least 0.98; each of {runs} runs",
            max(results[0.0]["grpo"][0]) <= 2 and min(modes) >= 4.5 and min(correct) >= 0.98,
        ),
        Row(
            10,
            "The same with half of the cluster labels drawn at random",
            measured[0.5],
            f"discount at least 4; each of {runs} runs",
            min(results[0.5]["discount"][0]) >= 4,
        ),
    ]


def degenerate(runs: int = 5) -> list[Row]:
    """Row 11: cluster rewards equal GRPO's if alpha = 0 or every response is its own cluster."""
    equal = {"alpha = 0": True, "one cluster each": True}
    for seed in range(runs):
        rng = torch.Generator().manual_seed(seed)
        rewards = torch.randn(16, 8, generator=rng)
        grpo = advantages.group_advantages(rewards, "batch")
        labels = {"alpha = 0": torch.randint(3, rewards.shape, generator=rng), "one cluster each": torch.arange(8)}
        for (name, each), alpha in zip(labels.items(), (0.0, 0.5), strict=True):
            shaped = diversity.group_rewards(rewards, each.expand(rewards.shape), alpha)
            equal[name] &= torch.equal(advantages.group_advantages(shaped, "batch"), grpo)
    return [
        Row(
            11,
            "Discounted rewards are GRPO if alpha = 0 or if every response is a cluster of its own (by construction)",
            "; ".join(f"{name}: {'equal' if same else 'not equal'}" for name, same in equal.items()),
            "advantages equal bit for bit",
            all(equal.values()),
        )
    ]


# --- the table ---

EXPERIMENTS: dict[str, Callable[[], list[Row]]] = {
    "clip": clip,
    "stale": stale,
    "on_policy": on_policy,
    "length": length,
    "closed_form": closed_form,
    "kl": kl,
    "clip_higher": clip_higher,
    "diversity": keep_modes,
    "degenerate": degenerate,
    "distillation": distillation,
    "tail_bucket": tail_bucket,
    "bf16_logits": bf16_logits,
    "steps_to_teacher": steps_to_teacher,
}
VERDICTS = {True: "holds", False: "does not hold", None: "reported only"}


def markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table, by number."""
    lines = ["| # | claim (source) | measured: mean over runs (lowest-highest) | acceptance | verdict |"]
    lines.append("|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row.number):
        lines.append(f"| {row.number} | {row.claim} | {row.measured} | {row.acceptance} | {VERDICTS[row.holds]} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Runs the experiments and prints the table; returns 1 if an acceptance criterion is not met, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)} (default: all)"
    )
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    args = parser.parse_args(argv)
    if unknown := set(args.experiments) - EXPERIMENTS.keys():
        parser.error(f"unknown experiment {', '.join(sorted(unknown))}: choose from {', '.join(EXPERIMENTS)}")

    rows = []
    for name in dict.fromkeys(args.experiments or EXPERIMENTS):
        start = time.perf_counter()
        rows += EXPERIMENTS[name]()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    table = markdown(rows)
    print(table, end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table, encoding="utf-8")
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are too small for threads to pay off
    sys.exit(main())
