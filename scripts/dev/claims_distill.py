"""Rows 12 to 15 and 17 of the claims: distillation, with tables of logits as models.

Dims:  B completions, C completion tokens, V vocabulary, R independent runs, G completions per prompt,
       S tables of logits, one per prompt of each run, K copies so far
"""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
from claims_base import BEGIN, COPIES, DIGITS, END, MAX_TOKENS, Row, spread, write_digits

from common.maths import advantages, divergences, losses

# --- 12, 13, 14: distillation of a trigram into a bigram, which cannot become its teacher ---

CHAIN_VOCAB, CHAIN_TOKENS = 8, 20
DISTILLATIONS: dict[str, tuple[float, float | str]] = {  # share of the batches that the student writes; loss
    "SFT": (0.0, "sft"),
    "forward KL off-policy": (0.0, 0.0),
    "reverse KL off-policy": (0.0, 1.0),
    "forward KL on-policy": (1.0, 0.0),
    "JSD(0.5) on-policy": (1.0, 0.5),
    "reverse KL half on-policy": (0.5, 1.0),
    "reverse KL on-policy": (1.0, 1.0),
    "sampled token on-policy": (1.0, "sampled"),
}


def trigrams(runs: int) -> torch.Tensor:
    """Log-probabilities of a trigram teacher per run [R, V, V, V]: second-to-last, last, next token."""
    rng = torch.Generator().manual_seed(0)
    return (2 * torch.randn(runs, CHAIN_VOCAB, CHAIN_VOCAB, CHAIN_VOCAB, generator=rng)).log_softmax(-1)


def as_trigrams(table_RVV: torch.Tensor) -> torch.Tensor:
    """Logits of a bigram student per run as [R, V, V, V], independent of the second-to-last token."""
    return table_RVV[:, None].expand(-1, CHAIN_VOCAB, -1, -1)


def write_chains(probs_RVVV: torch.Tensor, B: int, rng: torch.Generator) -> torch.Tensor:
    """Samples B chains per run from two tokens 0; returns the frequency [R, V, V, V] of each trigram."""
    run = torch.arange(len(probs_RVVV)).repeat_interleave(B)
    before = last = torch.zeros_like(run)
    counts_RVVV = torch.zeros_like(probs_RVVV)
    for _ in range(CHAIN_TOKENS):
        drawn = torch.multinomial(probs_RVVV[run, before, last], 1, generator=rng)[:, 0]
        counts_RVVV.index_put_((run, before, last, drawn), torch.ones(()), accumulate=True)
        before, last = last, drawn
    return counts_RVVV / (B * CHAIN_TOKENS)


def expect_chains(probs_RVVV: torch.Tensor) -> torch.Tensor:
    """Expectation of what `write_chains` returns."""
    state_RVV, total_RVVV = torch.zeros_like(probs_RVVV[..., 0]), torch.zeros_like(probs_RVVV)
    state_RVV[:, 0, 0] = 1.0
    for _ in range(CHAIN_TOKENS):
        step_RVVV = state_RVV[..., None] * probs_RVVV
        total_RVVV += step_RVVV / CHAIN_TOKENS
        state_RVV = step_RVVV.sum(1)
    return total_RVVV


def distillation_gradient(
    table_RVV: torch.Tensor, teachers_RVVV: torch.Tensor, chains_RVVV: torch.Tensor, loss: float | str
) -> torch.Tensor:
    """Gradient [R, V, V] of the mean loss per token: "sft", "sampled", or the JSD with this beta."""
    table_RVV = table_RVV.detach().requires_grad_()
    logits_RVVV = as_trigrams(table_RVV)
    logps_RVVV = logits_RVVV.log_softmax(-1)
    if loss == "sft":
        values = -logps_RVVV
    elif loss == "sampled":  # policy gradient with the advantage log P - log Q
        ratio_RVVV = losses.token_ratio(logps_RVVV, logps_RVVV.detach())
        values = -ratio_RVVV * (teachers_RVVV - logps_RVVV.detach())
    else:
        values = divergences.generalized_jsd(logits_RVVV, teachers_RVVV, loss)[..., None]
    return torch.autograd.grad((chains_RVVV * values).sum(), table_RVV)[0]


def distil(
    on_policy: float, loss: float | str, teachers_RVVV: torch.Tensor, steps: int, B: int = 32, lr: float = 2.0
) -> torch.Tensor:
    """Trains students [R, V, V] from uniform, all runs at once; `on_policy` is the share of on-policy batches."""
    rng = torch.Generator().manual_seed(0)
    table_RVV = torch.zeros_like(teachers_RVVV[:, 0])
    for _ in range(steps):
        own = torch.rand(len(table_RVV), 1, 1, 1, generator=rng) < on_policy
        writers_RVVV = torch.where(own, as_trigrams(table_RVV).softmax(-1), teachers_RVVV.exp())
        chains_RVVV = write_chains(writers_RVVV, B, rng)
        table_RVV -= lr * distillation_gradient(table_RVV, teachers_RVVV, chains_RVVV, loss)
    return table_RVV


def distillation(runs: int = 20, steps: int = 400, batches: int = 50) -> list[Row]:
    """Rows 12, 13, 14: quality of the student's samples, its coverage of the teacher, and the sampled-token loss."""
    teachers = trigrams(runs)
    tables = {name: distil(*how, teachers, steps) for name, how in DISTILLATIONS.items()}
    own = {name: expect_chains(as_trigrams(table).softmax(-1)) for name, table in tables.items()}
    taught = expect_chains(teachers.exp())
    nll = {name: -(chains * teachers).sum((1, 2, 3)) for name, chains in {**own, "the teacher itself": taught}.items()}
    missed = {
        name: (taught.sum(-1) * divergences.generalized_jsd(as_trigrams(table), teachers, 0.0)).sum((1, 2))
        for name, table in tables.items()
    }
    full, sampled = "reverse KL on-policy", "sampled token on-policy"
    gain, versus_off = nll[full] / nll["SFT"], nll[full] / nll["reverse KL off-policy"]
    price, end = missed[full] / missed["SFT"], nll[sampled] / nll[full] - 1

    # the students of the full reverse KL: gradients of both losses, in expectation and on some batches
    copies, their_teachers = (x.repeat_interleave(batches, 0) for x in (tables[full], teachers))
    chains = write_chains(as_trigrams(copies).softmax(-1), 32, torch.Generator().manual_seed(1))
    expected, variance = {}, {}
    for name in (full, sampled):
        loss = DISTILLATIONS[name][1]
        expected[name] = distillation_gradient(tables[full], teachers, own[full], loss)
        gradients = distillation_gradient(copies, their_teachers, chains, loss).view(runs, batches, -1)
        variance[name] = gradients.var(1).sum(-1)
    error, size = (expected[full] - expected[sampled]).abs().max().item(), expected[full].abs().max().item()

    def column(found: dict[str, torch.Tensor], digits: int = 2) -> str:
        return "; ".join(f"{name} {spread(values.tolist(), digits)}" for name, values in found.items())

    return [
        Row(
            12,
            "On-policy beats off-policy distillation (arXiv 2306.13649), here of a trigram into a bigram",
            f"teacher's NLL of what the student writes, per token: {column(nll)}. Reverse KL on-policy is "
            f"{spread(gain.tolist())} of SFT, lower in {int((gain < 1).sum())}/{runs} runs, at most 0.75 in "
            f"{int((gain <= 0.75).sum())}; and {spread(versus_off.tolist())} of the reverse KL off-policy, lower in "
            f"{int((versus_off < 1).sum())}",
            "none (at most 0.75 of SFT in every run would show it)",
            None,
        ),
        Row(
            13,
            "What the on-policy reverse KL gains, it pays for in coverage (arXiv 2306.08543; arXiv 2306.13649)",
            f"KL(teacher, student) where the teacher writes: {column(missed)}",
            f"reverse KL on-policy above SFT; each of {runs} runs",
            bool((price > 1).all()),
        ),
        Row(
            14,
            "A sampled token with the advantage log P - log Q has the gradient of the full reverse KL in expectation, "
            "and a larger variance",
            f"NLL as in row 12 off by at most {end.abs().max():.1%}; expected gradients off by {error:.0e}, the "
            f"largest is {size:.0e}; variance of the gradient of a batch, summed over the table: "
            f"{column(variance, 5)}, {spread((variance[sampled] / variance[full]).tolist(), 1)} times as large",
            f"NLL within 5 %; each of {runs} runs; expected gradients within 1e-6, and above 1e-3",
            end.abs().max().item() <= 0.05 and error <= 1e-6 and size > 1e-3,
        ),
    ]


# --- 15: what a teacher behind a wire can send ---


def tail_bucket(runs: int = 3, V: int = 64) -> list[Row]:
    """Row 15: top-k against the full divergence, for random teachers and students at every distance from them."""
    betas = (0.0, 0.1, 0.5, 0.9, 1.0)
    over, apart, shares = [], [], {k: [] for k in (1, 2, 8, 32, V - 1, V)}
    for seed in range(runs):
        rng = torch.Generator().manual_seed(seed)
        teacher, noise = 3 * torch.randn(2, 200, V, generator=rng)
        student = teacher + torch.linspace(0, 1, 200)[:, None] * noise
        student[100:] += 14 * (teacher[100:] >= teacher[100:].topk(8).values[:, -1:])  # sure of the teacher's best 8
        logps, ids = teacher.log_softmax(-1).sort(-1, descending=True)
        for beta in betas:
            full = divergences.generalized_jsd(student, teacher, beta)
            for k in shares:
                top, tail = logps[:, :k], divergences.tail_logp(logps, torch.arange(k).expand(len(logps), k))
                cut = divergences.topk_divergence(student, ids[:, :k], top, tail, beta)
                over.append((cut - full).max().item())
                shares[k].append((cut.sum() / full.sum()).item())
            apart.append((cut - full).abs().max().item())  # k = V was the last
    return [
        Row(
            15,
            "The divergence over the teacher's top k tokens and a bucket for the others never exceeds the full one, "
            "and is equal to it at k = V (data-processing inequality)",
            f"above it by at most {max(over):.0e} nats; at k = V apart by at most {max(apart):.0e}; as a share of it, "
            "all positions together: "
            + "; ".join(f"k = {k} {spread(values)}" for k, values in shares.items() if k < V - 1)
            + f"; V = {V}, beta = {', '.join(map(str, betas))}",
            "1e-5 nats for both, and k = 1 at most half of the full, so that this says something",
            max(over) <= 1e-5 and max(apart) <= 1e-5 and max(shares[1]) <= 0.5,
        )
    ]


# --- 17: steps until a student is as good as a reinforced policy ---

LEARNING_RATES = (0.1, 0.2, 0.4, 0.8)  # of Adam


def expected_rewards(tables: torch.Tensor) -> torch.Tensor:
    """Expectation [S] of the reward of `write_digits`, exact; tables [S, token before, V] are those of digits 0-9."""
    probs, each = tables.softmax(-1), torch.arange(len(tables))
    digit = each % DIGITS
    state_SVK = torch.zeros(len(tables), BEGIN + 1, COPIES + 1)  # probability of the token before and copies so far
    state_SVK[:, BEGIN, 0] = 1.0
    rewards_S = torch.zeros(len(tables))
    for _ in range(MAX_TOKENS):
        rewards_S += (state_SVK[:, :, COPIES] * probs[:, :, END]).sum(1)
        state_SVK[:, :END] = torch.einsum("sbk,sbv->svk", state_SVK, probs[:, :, :END])
        state_SVK[:, END:] = 0.0  # nothing follows the end, and nothing returns to the beginning
        before_SK = state_SVK[each, digit]
        after_SK = before_SK.roll(1, dims=1)
        after_SK[:, 0], after_SK[:, COPIES] = 0.0, before_SK[:, COPIES - 1] + before_SK[:, COPIES]
        state_SVK[each, digit] = after_SK
    return rewards_S


def train_on_digits(
    kind: str, lr: float, teacher: torch.Tensor | None, steps: int, runs: int, seed: int, P: int = 32, G: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains tables from uniform, one update per step, by "GRPO", "full reverse KL" or "sampled token".

    Before an update the ratio is 1, so that GRPO is also GSPO, and no clip range matters.

    Returns:
        The tables at the end, and the expected rewards after each step, from 0 on, [steps + 1, runs].
    """
    rng = torch.Generator().manual_seed(seed)
    table = torch.zeros(runs * DIGITS, BEGIN + 1, END + 1, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=lr)
    first_row = torch.arange(runs)[:, None] * DIGITS
    tables = [table.detach().clone()]
    for _ in range(steps):
        prompts_B = (torch.randint(DIGITS, (runs, P), generator=rng) + first_row).flatten().repeat_interleave(G)
        tokens_BC, before_BC, mask_BC, rewards_B = write_digits(table.detach(), prompts_B, rng)
        states = prompts_B[:, None], before_BC
        if kind == "full reverse KL":
            values_BC = divergences.generalized_jsd(table, teacher, 1.0)[states]
        else:
            logps_BC = table.log_softmax(-1)[*states, tokens_BC]
            if kind == "GRPO":
                advantages_BC = advantages.group_advantages(rewards_B.view(-1, G), "group").view(-1, 1)
            else:
                advantages_BC = teacher.log_softmax(-1)[*states, tokens_BC] - logps_BC.detach()
            values_BC = -losses.token_ratio(logps_BC, logps_BC.detach()) * advantages_BC
        loss = losses.aggregate(values_BC, mask_BC, "seq_mean", P * G)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tables.append(table.detach().clone())
    return tables[-1], expected_rewards(torch.cat(tables)).view(steps + 1, runs, DIGITS).mean(2)


def fewest_steps(curves: dict[float, torch.Tensor], target_R: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The best learning rate, and the first steps [R] at which its rewards [steps + 1, R] reach the target.

    A learning rate counts only if the mean reward of the last ten steps is at the target or above, because larger
    ones pass it on the way to a policy that is worse. A run that never reaches it counts with the last step.
    """
    found = {}
    for lr, curve in curves.items():
        there = curve >= target_R
        steps_R = torch.where(there.any(0), there.int().argmax(0), len(curve) - 1).float()
        found[lr] = bool(curve[-10:].mean() < target_R.mean()), steps_R
    best = min(found, key=lambda lr: (found[lr][0], found[lr][1].mean().item()))
    return best, found[best][1]


def steps_to_teacher(runs: int = 5, steps: int = 100) -> list[Row]:
    """Row 17: GRPO against distillation from the policy that GRPO ends with."""
    trained = {lr: train_on_digits("GRPO", lr, None, steps, runs, seed=0) for lr in LEARNING_RATES}
    teacher, curve = max(trained.values(), key=lambda each: each[1][-1].mean().item())
    start, end = curve[0], curve[-1]
    target = start + 0.9 * (end - start)
    best_lr, reinforced = fewest_steps({lr: rewards for lr, (_, rewards) in trained.items()}, target)
    parts = [f"GRPO {spread(reinforced.tolist(), 0)} at learning rate {best_lr}"]
    for kind in ("full reverse KL", "sampled token"):
        curves = {lr: train_on_digits(kind, lr, teacher, steps, runs, seed=1)[1] for lr in LEARNING_RATES}
        best_lr, distilled = fewest_steps(curves, target)
        share = distilled / reinforced
        parts.append(
            f"{kind} {spread(distilled.tolist(), 0)} at {best_lr}, which is {spread(share.tolist())} of GRPO's, at "
            f"most 1/3 in {int((share <= 1 / 3).sum())}/{runs} runs"
        )
    return [
        Row(
            17,
            "On-policy distillation reaches a reinforced policy in 7 to 10 times fewer steps than reinforcement "
            "(thinkingmachines.ai/blog/on-policy-distillation; the setting is that of arXiv 2306.13649)",
            f"steps to 90 % of what GRPO gains in {steps}, from {spread(start.tolist())} to {spread(end.tolist())}; "
            f"256 samples per step, best of {len(LEARNING_RATES)} learning rates each: {'; '.join(parts)}",
            "none (at most 1/3 of GRPO's steps in every run, with either loss, would show it)",
            None,
        )
    ]
