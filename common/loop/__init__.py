"""The parts of a training script: policy, reference, sampler, scorer, trainer, run, options.

May import: base, maths, tasks, model, fused, generation, training, run, distill, planning. Start
with gspo/gspo.py, which uses most of them, then policy.py and trainer.py. Distillation adds
student.py and offloading.py; similarity groups add similar.py.
"""

from common.base.settings import PromptSettings, RewardSettings, RLSettings, Settings
from common.loop.policy import Policy, Reference, fill_logps
from common.loop.run import Run, load_data, pin_date_of
from common.loop.sampler import Sampler, evaluate, resample
from common.loop.scorer import Scorer, add_overlong_penalty, assign_advantages, group_advantages
from common.loop.trainer import Counts, Stats, Trainer, policy_stats, token_stats

__all__ = [
    "Counts", "Policy", "PromptSettings", "RLSettings", "Reference", "RewardSettings", "Run", "Sampler", "Scorer",
    "Settings", "Stats", "Trainer", "add_overlong_penalty", "assign_advantages", "evaluate", "fill_logps",
    "group_advantages", "load_data", "pin_date_of", "policy_stats", "resample", "token_stats",
]  # fmt: skip
