"""Drafts: a prompt's completions of the last pass over the data, tried as completions of this pass.

Every token has its own random number, which picks the token from the distribution at its place. One
forward pass over a draft gives the distributions at all of its places, and so all tokens up to the
first that differs from the draft. The draft does not influence what is drawn: up to rounding, the
completions are those that the current policy gives token by token.

SPEC-RL (arXiv 2509.23232) keeps a token of a draft with probability min(1, p_new / p_old) instead,
and so keeps more. But the policy was trained on the draft: its new probabilities depend on the
tokens that are tested with them, so what is kept is not a sample of the current policy.

Dims: P prompts, G completions per prompt.
"""

from array import array
from bisect import bisect_right
from collections.abc import Hashable, Sequence

import torch

from common.generation.runner import Runner
from common.generation.scheduler import PREFILL_TOKENS, Draft, Group
from common.maths.sampling import Sampling

MOST_TOKENS = 2**28  # kept of all prompts together: 1 GiB
FIRST = 16  # tokens that the first draft of a row tries
LONGER = 4  # a later draft tries this many times the tokens drawn along the one before it
WORTH = 8  # another pass follows if one drew this many tokens per row on average: it costs several decode steps


class Earlier:
    """Completions of each prompt from its last pass; in memory only, so a resumed run begins with none."""

    def __init__(self, most_tokens: int = MOST_TOKENS):
        """Starts without completions; the oldest go when there are more than `most_tokens` tokens."""
        self.most_tokens, self.num_tokens = most_tokens, 0
        self._by_prompt: dict[Hashable, list[array]] = {}

    def of(self, prompts: Sequence[Hashable]) -> list[list[array]]:
        """Completions of each prompt in lexical order; none for a new prompt.

        Args:
            prompts: their keys, such as row numbers in the data.
        """
        return [self._by_prompt.get(prompt, []) for prompt in prompts]

    def put(self, prompts: Sequence[Hashable], completions: Sequence[torch.Tensor]) -> None:
        """Keeps completions in place of older ones.

        Args:
            prompts: P, as `of` takes them.
            completions: P * G tensors of token ids, those of a prompt side by side.
        """
        G = len(completions) // len(prompts)
        for i, prompt in enumerate(prompts):
            self._forget(prompt)
            kept = sorted(array("i", ids.tolist()) for ids in completions[i * G : (i + 1) * G])
            self._by_prompt[prompt] = kept
            self.num_tokens += sum(map(len, kept))
        while self.num_tokens > self.most_tokens:
            self._forget(next(iter(self._by_prompt)))

    def _forget(self, prompt: Hashable) -> None:
        self.num_tokens -= sum(map(len, self._by_prompt.pop(prompt, [])))


def continuation(earlier: Sequence[array], text: array) -> array | None:
    """An earlier completion that begins with a text and goes on; None if there is none.

    Args:
        earlier: in lexical order.
        text: token ids.

    Returns:
        The middle one of several: if more than half of them go on alike, it is one of those.
    """
    first = bisect_right(earlier, text)
    last = bisect_right(earlier, text, lo=first, key=lambda ids: ids[: len(text)])
    return earlier[(first + last) // 2] if first < last else None


def verify(
    runner: Runner, groups: list[Group], earlier: Sequence[Sequence[array]], sampling: Sampling
) -> tuple[list[int], list[int]]:
    """Draws tokens of rows along their prompts' earlier completions, in a few forward passes.

    Drafts grow while they are right. After a token that differs, another earlier completion that
    begins with the new text is the next draft.

    Args:
        runner: holds the rows.
        groups: neighbors in the batch, each row of which has its first token.
        earlier: completions of each prompt of the rollout, from `Earlier.of`.
        sampling: the distribution tokens are drawn from.

    Returns:
        Of each row, in order: tokens drawn, and how many of them stood in the draft.
    """
    members = [(group, member) for group in groups for member in range(len(group.rows))]
    texts = [array("i", [token]) for token in runner.last_tokens(groups)]
    drafted, widths, ends = [0] * len(texts), [FIRST] * len(texts), set(runner.end.tolist())
    gained = WORTH * len(texts)
    while gained >= WORTH * len(texts):
        gained, drafts = 0, {}
        for i, (group, member) in enumerate(members):
            limit = min(len(texts[i]) + widths[i], runner.cache.space.tokens)
            if texts[i][-1] in ends or len(texts[i]) >= limit:
                continue
            if found := continuation(earlier[group.prompt], texts[i]):
                drafts[i] = Draft(group, member, len(texts[i]), found[:limit])
        for part in _parts(drafts):
            results = runner.extend([drafts[i] for i in part], sampling)
            for i, new, last in zip(part, *results, strict=True):
                count, tokens = len(texts[i]), drafts[i].tokens
                texts[i] = tokens[: count + new - 1] + array("i", [last])
                drafted[i] += new - (last != tokens[count + new - 1])
                widths[i] = LONGER * new
                gained += new
    return [len(text) - 1 for text in texts], drafted


def _parts(drafts: dict[int, Draft]) -> list[list[int]]:
    """Drafts that go into one forward pass, which reads PREFILL_TOKENS of the cache, or a single longer row."""
    parts: list[list[int]] = []
    total = PREFILL_TOKENS
    for i, draft in drafts.items():
        total += (size := draft.group.length + len(draft.tokens))
        if total > PREFILL_TOKENS:
            parts.append([])
            total = size
        parts[-1].append(i)
    return parts
