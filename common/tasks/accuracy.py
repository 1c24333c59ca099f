"""Accuracy over several samples of a prompt: pass@k, majority vote, number of different right answers."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from common.tasks.answers import normal_answer


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    Args:
        num_samples: n, samples of one prompt.
        num_right: c, correct samples, 0 to n.
        k: attempts, 1 to n.

    Returns:
        1 - C(n - c, k) / C(n, k), in [0, 1]. Chen et al. 2021, arXiv 2107.03374, Eq. 1.

    Raises:
        ValueError: k or c is out of range.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_right} right: k is 1 to the number of samples, and no more "
            "can be right than were drawn; take more samples"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)  # exact integers up to the division


def majority_is_right(completions: Sequence[str], right: Sequence[bool]) -> float:
    """1 if the most frequent answer of a prompt's samples is right, else 0; also 0 if none has an answer.

    Answers are compared by value; of equally frequent ones, the first sampled counts.

    Args:
        completions: samples of one prompt.
        right: whether each is correct.
    """
    found = [normal_answer(completion) for completion in completions]
    counts = Counter(answer for answer in found if answer is not None)
    return float(bool(counts) and right[found.index(counts.most_common(1)[0][0])])


def effective_number(answers: Sequence[str]) -> float:
    """exp(entropy) of the answers' frequencies: 1 for a single answer, n for n equally frequent ones.

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError("effective number of 0 answers: at least one is needed; leave out prompts without any")
    shares = [count / len(answers) for count in Counter(answers).values()]
    return math.exp(-sum(share * math.log(share) for share in shares))


def mean(values: Iterable[float]) -> float | None:
    """Mean of the values; None if there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None
